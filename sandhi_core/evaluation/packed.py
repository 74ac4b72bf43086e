"""lm-eval's HF model with packed, layer-cached log-likelihoods and drafted outputs: the same numbers from less work.

What is asked, tokenised, truncated and templated stays lm-eval's own code; only the computing differs. Measured
against lm-eval's own numbers when a model is first asked; a model that cannot be packed is scored plainly.
"""

import hashlib
import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor

from sandhi_core.evaluation.drafts import Drafts
from sandhi_core.evaluation.early import Following, Watch
from sandhi_core.evaluation.layers import LayerCache, LayeredModel
from sandhi_core.evaluation.packing import Answer, Pack, Scored, answered, cheapest, pack, scored, whole

logger = logging.getLogger(__name__)

Request = tuple[tuple[str, str], list[int], list[int]]
"""(context, continuation) as texts, then the tokens of each."""

CHECKED = 4
"""So many requests, besides the longest, are scored both ways before packing is trusted."""

UNFIT = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)
"""What a model's code may raise where it is not made for being run so."""


@dataclass
class _Asked:
    """One set of sequences: packed once, its states kept from call to call."""

    packs: list[Pack]
    cache: LayerCache


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
        border = math.inf
        try:
            self._layered = LayeredModel(model)
            border = self._layered.border
        except UNFIT as error:
            self._score_plainly(str(error))
        self.drafts = Drafts(model, self.tokenizer, self._chosen, batch_tokens, border)
        self._drafted = False
        self._checked = 0  # tokens of the longest request that was scored both ways
        self._cache = {str(model.device): 1 << 30} if cache is None else cache
        self._asked: dict[bytes, _Asked] = {}  # in the order of their last use
        self._kinds = 1
        self._parts = 1
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
        self._check(requests)
        if self.plain is not None:
            plainly: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, True, override_bs)
            return plainly
        found = self._packed(requests, self._following)
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
        self._parts = 2 if halved else 1
        self._kinds = max(1, len(requests))
        for kind, asked in requests.items():
            # A function of the requests alone: scores must not depend on what was scored before.
            self.batch_size_per_gpu = max(1, self._batch_tokens // self._parts // self._longest(asked))
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

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """lm-eval's own; where outputs are drafted in one call a kind of settings, so that all are checked together."""
        contexts = {text: self.tok_encode(text) for text in {request.args[0] for request in requests}}
        self._check([((c, ""), tokens[:-1], tokens[-1:]) for c, tokens in sorted(contexts.items()) if len(tokens) > 1])
        self._drafted = self.plain is None and all(
            map(self._may_draft, {repr(r.args[1]): r.args[1] for r in requests}.values())
        )
        batch = self.batch_size_per_gpu
        if self._drafted:
            self.batch_size_per_gpu = max(1, len(requests))
        try:
            texts: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
        finally:
            self.batch_size_per_gpu = batch
        return texts

    def _may_draft(self, asked: dict[str, Any]) -> bool:
        """Whether outputs depend on their own context only (with `max_length` on what stands beside it), row by row."""
        settings = normalize_gen_kwargs(asked)
        greedy = not settings["do_sample"] and self.drafts.is_greedy(_greedily(settings))
        return greedy and "max_length" not in settings

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], attention_mask: Tensor, **settings: Any
    ) -> Tensor:
        """[rows, width of context + longest output], padded: what greedy decoding gives."""
        if not self._drafted:
            whole: Tensor = super()._model_generate(
                context, max_length, stop, attention_mask=attention_mask, **settings
            )
            return whole
        rows = [tuple(row[seen.bool()].tolist()) for row, seen in zip(context, attention_mask, strict=True)]
        room = (
            self.model.generation_config.max_new_tokens or max_length - context.shape[1]
        )  # to generate, it has more say
        outputs = self.drafts.outputs(rows, room, stop, _greedily(settings))
        longest = max(map(len, outputs))
        padded = [[*out, *[self.tokenizer.pad_token_id] * (longest - len(out))] for out in outputs]
        return torch.cat([context, torch.tensor(padded, dtype=context.dtype, device=context.device)], dim=1)

    def _longest(self, requests: Sequence[Instance]) -> int:
        """Tokens of the longest request, at least 1 and at most what the model takes."""
        texts = ("".join(a for a in request.args if isinstance(a, str)) for request in requests)
        longest: int = min(max(len(self.tok_encode(max(texts, key=len))), 1), self.max_length)
        return longest

    def _check(self, requests: Sequence[Request]) -> None:
        """Hold packed answers to lm-eval's own, where none as long were before, on the longest request and a few more:
        masks, positions or scaling that an architecture has and this does not know show there."""
        length, longest = max(
            ((len(r[1]) + len(r[2]), r) for r in requests), key=lambda found: found[0], default=(0, None)
        )
        if self.plain is not None or longest is None or length <= self._checked:
            return
        sample = [*requests[:CHECKED], longest]
        plainly = super()._loglikelihood_tokens
        own = [plainly([request], True)[0] for request in sample]  # alone: what stands beside it may move a number
        slack = 1e-3 if self.model.dtype in (torch.float32, torch.float64) else 5e-2
        try:
            sequences = [self._sequence(request) for request in sample]
            found = [whole(answer) for answer in self._scored(sequences, again=False)]
        except UNFIT as error:
            self._score_plainly(" ".join(str(error).split()))
            return
        for (mine, _), (theirs, _) in zip(found, own, strict=True):
            # NaN is lm-eval's answer too, where the weights give it.
            if not (math.isnan(theirs) or mine == theirs or abs(mine - theirs) <= slack * max(1.0, abs(theirs))):
                self._score_plainly(f"packed, a request has log-likelihood {mine:.6g} instead of {theirs:.6g}")
                return
        self._check_starts(self._packs(sequences), slack)
        if not any(math.isnan(theirs) for theirs, _ in own):  # which tell nothing about the model's code
            self._checked = length

    def _check_starts(self, packs: Sequence[Pack], slack: float) -> None:
        """Hold passes that begin within the model to whole ones, which every pass is from then on where they differ."""
        if not self._cache:
            return
        with torch.inference_mode():
            try:
                reason = "" if self._layered.starts_anywhere(packs, slack) else "they would give other numbers"
            except UNFIT as error:
                reason = " ".join(str(error).split()) or type(error).__name__
        if reason:
            self._cache = {}
            logger.warning("scored without the layer cache, its layers cannot be skipped: %s", reason)

    def _score_plainly(self, reason: str) -> None:
        self.plain = reason
        logger.warning("scored plainly, without packing or layer cache: %s", reason)

    def _packed(self, requests: Sequence[Request], following: Following | None = None) -> list[tuple[float, bool]]:
        sequences = [self._sequence(request) for request in requests]
        return [whole(answer) for answer in self._scored(sequences, following=following)]

    def _sequence(self, request: Request) -> Scored:
        _, context, continuation = request
        return scored(context, continuation, self.max_length)

    def _chosen(self, sequences: Sequence[Scored], again: bool) -> list[tuple[int, ...]]:
        """The greedy choice at every target of each sequence; states are kept for those that come `again`."""
        return [answer.chosen for answer in self._scored(sequences, again=again)]

    def _scored(
        self, sequences: Sequence[Scored], *, again: bool = True, following: Following | None = None
    ) -> list[Answer]:
        asked = self._set(sequences) if again else _Asked(self._packs(sequences), LayerCache(()))
        order = following.order(asked.packs) if following else None
        found: dict[int, Answer] = {}
        with torch.inference_mode():
            for at, logits in self._layered.swept(asked.packs, asked.cache, self.weights, order):
                answers = answered(asked.packs[at], logits)
                found |= answers
                if following:
                    following.heard({number: whole(answer) for number, answer in answers.items()})
        return [found[number] for number in range(len(sequences))]

    def _set(self, sequences: Sequence[Scored]) -> _Asked:
        """The packs of `sequences`, made when they are first asked. States of as many sets are kept as one call of
        `answer` asks kinds of requests."""
        digest = hashlib.sha256(str(self._parts).encode())
        for one in sequences:
            digest.update(array("q", [len(one.tokens), len(one.targets), *one.tokens, *one.targets]).tobytes())
        key = digest.digest()
        asked = self._asked.pop(key, None)
        if asked is None:
            packs = self._packs(sequences)
            while len(self._asked) >= self._kinds:
                del self._asked[next(iter(self._asked))]
            asked = _Asked(packs, self._layer_cache(sum(len(p.parents) for p in packs)))
        self._asked[key] = asked
        return asked

    def _packs(self, sequences: Sequence[Scored]) -> list[Pack]:
        width, border = self.model.config.get_text_config().hidden_size, self._layered.border
        budget, packs = cheapest(sequences, width, self._batch_tokens, border)
        return packs if self._parts == 1 else pack(sequences, max(1, budget // self._parts), border)

    def _layer_cache(self, tokens: int) -> LayerCache:
        """Every so many layers that kept and tried states, each before and within a layer, fit where most do."""
        config, count = self.model.config.get_text_config(), self._layered.count
        one = 4 * tokens * config.hidden_size * self.model.dtype.itemsize * self._kinds
        fitting = {device: min(most // max(one, 1), count) for device, most in self._cache.items()}
        device = max(fitting, key=lambda place: fitting[place], default="cpu")
        most = fitting.get(device, 0)
        return LayerCache(range(0, count, -(-count // most)) if most else (), device)


def _greedily(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `generate` without what only sampling asks for."""
    return {k: v for k, v in settings.items() if k != "temperature"} | {"do_sample": False}
