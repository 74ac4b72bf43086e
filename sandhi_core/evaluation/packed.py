"""lm-eval's HF model with packed, layer-cached log-likelihoods: the same numbers from less work.

What is asked, tokenised, truncated and templated stays lm-eval's own code; only the computing differs. Measured
against lm-eval's own numbers when a model is first asked; a model that cannot be packed is scored plainly.
"""

import hashlib
import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from sandhi_core.evaluation.layers import LayerCache, LayeredModel
from sandhi_core.evaluation.packing import Pack, Scored, pack, scored

logger = logging.getLogger(__name__)

Request = tuple[tuple[str, str], list[int], list[int]]
"""(context, continuation) as texts, then the tokens of each."""


CHECKED = 4
"""So many requests, besides the longest, are scored both ways before packing is trusted."""


class _Asked:
    """One set of requests: packed once, its states kept from call to call."""

    def __init__(self, sequences: Sequence[Scored], budget: int, layers: Sequence[int]) -> None:
        self.packs = pack(sequences, budget)
        self.cache = LayerCache(layers)


class PackedLM(HFLM):  # type: ignore[misc]
    """A resident model that scores requests packed, from the lowest layer that changed.

    `weights` names the tensors that are changed now (to what names their bytes); whoever changes the model's
    weights keeps it true. `batch_tokens`: tokens computed at once. `cache_bytes`: what hidden states may take.
    `plain` says why the model is scored plainly, where it is.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_tokens: int = 8192, cache_bytes: int = 1 << 30) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=64)
        self.weights: Mapping[str, str] = {}
        self.plain: str | None = None
        self._batch_tokens = batch_tokens
        try:
            self._layered = LayeredModel(model)
        except (ValueError, AttributeError) as error:
            self._score_plainly(str(error))
        self._checked = False
        # Attention costs T * T a tree, everything else T * width: beyond a width's tokens larger trees cost more.
        self._tree_tokens = min(batch_tokens, max(256, model.config.get_text_config().hidden_size))
        self._cache_bytes = cache_bytes
        self._asked: dict[bytes, _Asked] = {}
        self._encoded: dict[tuple[str, str], tuple[list[int], list[int]]] = {}

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        pair = (context, continuation)
        if pair not in self._encoded:
            self._encoded[pair] = super()._encode_pair(context, continuation)
        return self._encoded[pair]

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding gives it."""
        if self.plain is None and not self._checked:
            self._check(requests)
        if self.plain is not None:
            plainly: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, True, override_bs)
            return plainly
        found = self._packed(requests)
        for (texts, _, _), answer in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def answer(self, requests: dict[str, list[Instance]], weights: Mapping[str, str]) -> None:
        """Append one response to every request's `resps`, under `weights`, which the model holds now."""
        self.weights = weights
        for kind, asked in requests.items():
            # A function of the requests alone: scores must not depend on what was scored before.
            self.batch_size_per_gpu = max(1, self._batch_tokens // self._longest(asked))
            for request, response in zip(asked, getattr(self, kind)(asked, disable_tqdm=True), strict=True):
                request.resps.append(response)

    def _longest(self, requests: Sequence[Instance]) -> int:
        """Tokens of the longest request, at least 1 and at most what the model takes."""
        texts = ("".join(a for a in request.args if isinstance(a, str)) for request in requests)
        longest: int = min(max(len(self.tok_encode(max(texts, key=len))), 1), self.max_length)
        return longest

    def _check(self, requests: Sequence[Request]) -> None:
        """Hold packed answers to lm-eval's own on the longest request and a few more: masks, positions or scaling that
        an architecture has and this does not know show there."""
        longest = max(requests, key=lambda r: len(r[1]) + len(r[2]))
        sample = [*requests[:CHECKED], longest]
        own = super()._loglikelihood_tokens(sample, True)
        slack = 1e-3 if self.model.dtype in (torch.float32, torch.float64) else 5e-2
        try:
            found = self._packed(sample)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            self._score_plainly(" ".join(str(error).split()))
            return
        for (mine, _), (theirs, _) in zip(found, own, strict=True):
            # NaN is lm-eval's answer too, where the weights give it.
            if not (math.isnan(theirs) or abs(mine - theirs) <= slack * max(1.0, abs(theirs))):
                self._score_plainly(f"packed, a request has log-likelihood {mine:.6g} instead of {theirs:.6g}")
                return
        self._checked = True

    def _score_plainly(self, reason: str) -> None:
        self.plain = reason
        logger.warning("scored plainly, without packing or layer cache: %s", reason)

    def _packed(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        asked = self._set(requests)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with torch.inference_mode():
            sweep = self._layered.swept(asked.packs, asked.cache, self.weights)
            for one, logits in zip(asked.packs, sweep, strict=True):
                for number, answer in _answers(one, logits):
                    found[number] = answer
        return found

    def _set(self, requests: Sequence[Request]) -> _Asked:
        """The packs of `requests`, which are made when they are first asked. Other sets' states are dropped."""
        digest = hashlib.sha256()
        for _, context, continuation in requests:
            digest.update(array("q", [len(context), len(continuation), *context, *continuation]).tobytes())
        key = digest.digest()
        if key not in self._asked:
            sequences = [scored(context, continuation, self.max_length) for _, context, continuation in requests]
            self._asked = {key: _Asked(sequences, self._tree_tokens, ())}
            asked = self._asked[key]
            asked.cache = LayerCache(self._cached_layers(sum(len(p.parents) for p in asked.packs)))
        return self._asked[key]

    def _cached_layers(self, tokens: int) -> range:
        """Every so many layers that kept and tried states, each before and within a layer, fit into cache_bytes."""
        config = self.model.config.get_text_config()
        one = 4 * tokens * config.hidden_size * self.model.dtype.itemsize
        fitting = min(self._cache_bytes // max(one, 1), self._layered.count)
        if fitting == 0:
            return range(0)
        return range(0, self._layered.count, -(-self._layered.count // fitting))


def _answers(one: Pack, logits: Tensor) -> list[tuple[int, tuple[float, bool]]]:
    """(number of the request, its log-likelihood, whether every target is the greedy choice)."""
    likelihoods = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    places = torch.tensor([p for _, at, _ in one.requests for p in at], device=logits.device)
    targets = torch.tensor([t for *_, wanted in one.requests for t in wanted], device=logits.device)
    own = likelihoods[places, targets].tolist()
    greedy = (likelihoods.argmax(dim=-1)[places] == targets).tolist()
    answers, at = [], 0
    for number, _, wanted in one.requests:
        span = slice(at, at + len(wanted))
        answers.append((number, (sum(own[span]), all(greedy[span]))))
        at = span.stop
    return answers
