"""lm-eval's HF model with packed, layer-cached log-likelihoods and drafted outputs: the same numbers from less work.

What is asked, tokenised, truncated and templated stays lm-eval's own code; only the computing differs. Measured
against lm-eval's own numbers when a model is first asked; a model that cannot be packed is scored plainly.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from sandhi_core.evaluation.drafts import Drafts
from sandhi_core.evaluation.early import Following, Watch
from sandhi_core.evaluation.layers import LayeredModel
from sandhi_core.evaluation.packing import Pack, Scored, scored
from sandhi_core.evaluation.sets import PackedSets

logger = logging.getLogger(__name__)

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""(context, continuation) as texts where these are known, then the tokens of each."""

CHECKED = 4
"""So many requests, besides the longest, are scored both ways before packing is trusted."""


@dataclass(frozen=True)
class Answer:
    """Of a sequence's targets: the log-likelihood of each, and the greedy choice in its place."""

    targets: tuple[int, ...]
    own: list[float]
    chosen: tuple[int, ...]


class PackedLM(HFLM):  # type: ignore[misc]
    """A resident model that scores requests packed, from the lowest layer that changed.

    `weights` names the tensors that are changed now (to what names their bytes); whoever changes the model's
    weights keeps it true. `batch_tokens`: tokens computed at once. `cache`: bytes that hidden states may take, by the
    device they live on; of devices that hold as many the first.
    `plain` says why the model is scored plainly, where it is.
    """

    def __init__(
        self, model: Any, tokenizer: Any, batch_tokens: int = 8192, cache: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=64)
        self.weights: Mapping[str, str] = {}
        self.plain: str | None = None
        self._batch_tokens = batch_tokens
        self.drafts = Drafts(model, self.tokenizer, self._chosen, batch_tokens)
        try:
            self._layered = LayeredModel(model)
        except (ValueError, AttributeError) as error:
            self._score_plainly(str(error))
        else:
            memory = {str(model.device): 1 << 30} if cache is None else cache
            width = model.config.get_text_config().hidden_size
            self.sets = PackedSets(width, model.dtype.itemsize, self._layered.count, batch_tokens, memory)
        self._checked = False
        self._answering: list[int] = []  # the requests of the last `answer`, by their identity
        self._halved = False
        self._following: Following | None = None
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
        found = self._packed(requests, following=self._following)
        for (texts, _, _), answer in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def answer(
        self,
        requests: dict[str, list[Instance]],
        weights: Mapping[str, str],
        *,
        halved: bool = False,
        watch: Watch | None = None,
    ) -> None:
        """Give every request's `resps` one response, under `weights`, which the model holds now; `halved`: in batches
        of half the size, which moves floating-point noise and nothing else. `watch` is told what is answered and may
        end it by an exception: then what was answered has been in vain, and nothing of it is built on."""
        self.weights = weights
        self._halved = halved
        same = [id(request) for asked in requests.values() for request in asked]
        if same != self._answering:
            self.forget()
        self._answering = same
        for kind, asked in requests.items():
            # A function of the requests alone: scores must not depend on what was scored before.
            self.batch_size_per_gpu = max(1, self._batch_tokens // (2 if halved else 1) // self._longest(asked))
            # Other kinds ask for several sequences a request, or in several passes: they are watched as a whole.
            self._following = Following(watch, asked) if watch and kind == "loglikelihood" else None
            try:
                responses = getattr(self, kind)(asked, disable_tqdm=True)
            finally:
                self._following = None
            for request, response in zip(asked, responses, strict=True):
                request.resps[:] = [response]
            if watch:
                watch.answered(asked)

    def forget(self) -> None:
        """Drop all hidden states: what is asked next is computed from the first layer on."""
        if self.plain is None:
            self.sets.forget()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """lm-eval's own, in one call a kind of settings, so that all drafts are checked together."""
        if self.plain is None and not self._checked and requests:
            longest = max(requests, key=lambda request: len(request.args[0]))
            contexts = [self.tok_encode(request.args[0]) for request in (*requests[:CHECKED], longest)]
            self._check([(None, tokens[:1], tokens[1:]) for tokens in contexts if len(tokens) > 1])
        if self.plain is None:
            self.batch_size_per_gpu = max(1, len(requests))
        texts: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
        return texts

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], attention_mask: Tensor, **settings: Any
    ) -> Tensor:
        """[rows, width of context + longest output], padded: what greedy decoding gives."""
        if self.plain is not None or settings.get("do_sample") or settings.get("num_beams", 1) > 1:
            whole: Tensor = super()._model_generate(
                context, max_length, stop, attention_mask=attention_mask, **settings
            )
            return whole
        rows = [tuple(row[seen.bool()].tolist()) for row, seen in zip(context, attention_mask, strict=True)]
        settings = {k: v for k, v in settings.items() if k != "temperature"} | {"do_sample": False}
        outputs = self.drafts.outputs(rows, max_length - context.shape[1], stop, settings)
        longest = max(map(len, outputs))
        padded = [[*out, *[self.tokenizer.pad_token_id] * (longest - len(out))] for out in outputs]
        return torch.cat([context, torch.tensor(padded, dtype=context.dtype, device=context.device)], dim=1)

    def _longest(self, requests: Sequence[Instance]) -> int:
        """Tokens of the longest request, at least 1 and at most what the model takes."""
        texts = ("".join(a for a in request.args if isinstance(a, str)) for request in requests)
        longest: int = min(max(len(self.tok_encode(max(texts, key=len))), 1), self.max_length)
        return longest

    def _check(self, requests: list[Request]) -> None:
        """Hold packed answers to lm-eval's own on the longest request and a few more: masks, positions or scaling that
        an architecture has and this does not know show there."""
        if not requests:
            return
        longest = max(requests, key=lambda r: len(r[1]) + len(r[2]))
        sample = [*requests[:CHECKED], longest]
        own = super()._loglikelihood_tokens(sample, True)
        slack = 1e-3 if self.model.dtype in (torch.float32, torch.float64) else 5e-2
        try:
            found = self._packed(sample, again=False)
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

    def _packed(
        self, requests: Sequence[Request], *, again: bool = True, following: Following | None = None
    ) -> list[tuple[float, bool]]:
        sequences = [scored(context, continuation, self.max_length) for _, context, continuation in requests]
        return [_whole(answer) for answer in self._scored(sequences, again=again, following=following)]

    def _chosen(self, sequences: Sequence[Scored], again: bool) -> list[tuple[int, ...]]:
        """The greedy choice at every target of each sequence; states are kept for those that come `again`."""
        return [answer.chosen for answer in self._scored(sequences, again=again)]

    def _scored(
        self, sequences: Sequence[Scored], *, again: bool = True, following: Following | None = None
    ) -> list[Answer]:
        if again and not self._halved:
            asked = self.sets.lasting(sequences, alone=not self._answering)
        else:
            asked = self.sets.passing(sequences, halved=self._halved)
        order = following.order(asked.packs) if following else None
        found: dict[int, Answer] = {}
        with torch.inference_mode():
            for at, logits in self._layered.swept(asked.packs, asked.cache, self.weights, order):
                answers = _answers(asked.packs[at], logits)
                found |= answers
                if following:
                    following.heard({number: _whole(answer) for number, answer in answers.items()})
        return [found[number] for number in range(len(sequences))]


def _whole(answer: Answer) -> tuple[float, bool]:
    """As lm-eval wants it: of all targets together."""
    return sum(answer.own), answer.chosen == answer.targets


def _answers(one: Pack, logits: Tensor) -> dict[int, Answer]:
    """By number of the sequence."""
    likelihoods = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    places = torch.tensor([p for _, at, _ in one.requests for p in at], device=logits.device)
    targets = torch.tensor([t for *_, wanted in one.requests for t in wanted], device=logits.device)
    own = likelihoods[places, targets].tolist()
    chosen = likelihoods.argmax(dim=-1)[places].tolist()
    answers, at = {}, 0
    for number, _, wanted in one.requests:
        span = slice(at, at + len(wanted))
        answers[number] = Answer(wanted, own[span], tuple(chosen[span]))
        at = span.stop
    return answers
