"""From requests to responses under whatever weights the resident model holds now."""

from collections.abc import Sequence
from typing import Any, Protocol

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM


class Scorer(Protocol):
    """Answers a fixed set of requests. `lowest_layer` is the lowest layer whose weights differ from the last call's
    original: a scorer that keeps hidden states starts there."""

    def answer(self, requests: dict[str, list[Instance]], lowest_layer: int) -> None:
        """Append one response to every request's `resps`."""
        ...


class _ResidentLM(HFLM):  # type: ignore[misc]
    """lm-eval's HF model, tokenising each (context, continuation) once instead of for every set of weights."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=1)
        self._encoded: dict[tuple[str, str], tuple[list[int], list[int]]] = {}

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        pair = (context, continuation)
        if pair not in self._encoded:
            self._encoded[pair] = super()._encode_pair(context, continuation)
        return self._encoded[pair]


class PlainScorer:
    """lm-eval's own scoring of a model that stays in memory; computes every layer every time."""

    def __init__(self, model: Any, tokenizer: Any, batch_tokens: int) -> None:
        self._lm = _ResidentLM(model, tokenizer)
        self._batch_tokens = batch_tokens

    def answer(self, requests: dict[str, list[Instance]], lowest_layer: int) -> None:
        for kind, asked in requests.items():
            # A function of the requests alone: scores must not depend on what was scored before.
            self._lm.batch_size_per_gpu = max(1, self._batch_tokens // self._longest(asked))
            responses = getattr(self._lm, kind)(asked, disable_tqdm=True)
            for request, response in zip(asked, responses, strict=True):
                request.resps.append(response)

    def _longest(self, requests: Sequence[Instance]) -> int:
        """Tokens of the longest request, at least 1 and at most what the model takes."""
        longest = max(requests, key=lambda request: sum(len(a) for a in request.args if isinstance(a, str)))
        text = "".join(a for a in longest.args if isinstance(a, str))
        longest_tokens: int = min(max(len(self._lm.tok_encode(text)), 1), self._lm.max_length)
        return longest_tokens
