"""lm-eval's HF model with packed, layer-cached log-likelihoods and drafted outputs: the same numbers from less work.

What is asked, tokenised, truncated and templated stays lm-eval's own code; only the computing differs. Measured
against lm-eval's own numbers when a model is first asked; a model that cannot be packed is scored plainly.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor

from sandhi_core.evaluation.drafts import Drafts
from sandhi_core.evaluation.early import Following, Watch
from sandhi_core.evaluation.layers import LayeredModel
from sandhi_core.evaluation.packing import Answer, Pack, TokenSequence, answered, sequence_of, whole
from sandhi_core.evaluation.sets import Hidden, PackedSets
from sandhi_core.evaluation.tokenised import TokenisedOnceLM

logger = logging.getLogger(__name__)

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""(context, continuation) as texts where these are known, then the tokens of each."""

CHECKED = 4
"""So many requests, besides the longest, are scored both ways before packing is trusted."""

UNFIT = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)
"""What a model's code may raise where it is not made for being run so."""


class PackedLM(TokenisedOnceLM):
    """A resident model that scores requests packed, from the lowest layer that changed.

    `weights` names the tensors that are changed now (to what names their bytes); whoever changes the model's weights
    keeps it true. Where parameters were written in place or replaced and it says nothing of that, all states are
    forgotten (what is written through `.data` is not seen). `batch_tokens`: tokens computed at once. `cache`: bytes
    that hidden states may take, by the device they live on; of devices that hold as many the first.
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
        except UNFIT as error:
            self._score_plainly(str(error))
        else:
            border = self._layered.border
            memory = {str(model.device): 1 << 30} if cache is None else cache
            self.sets = PackedSets(
                Hidden(model.config.get_text_config().hidden_size, model.dtype.itemsize, self._layered.count),
                batch_tokens, border, memory,
            )  # fmt: skip
        self.drafts = Drafts(model, self.tokenizer, self._chosen, batch_tokens, border)
        self._drafted = False
        self._checked = 0  # tokens of the longest request that was scored both ways
        self._seen: tuple[object, Mapping[str, str]] = (None, {})  # the parameters' state, under which `weights`
        self._answering: list[int] = []  # the requests of the last `answer`, by their identity
        self._halved = False
        self._following: Following | None = None
        self._heard: list[TokenSequence] | None = None

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding gives it."""
        if self._heard is not None:
            self._heard += map(self._sequence, requests)
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

    def likelihoods(
        self, asked: Sequence[tuple[Sequence[int], Sequence[int]]], weights: Mapping[str, str]
    ) -> list[tuple[float, bool]]:
        """Of each continuation after its context, both as tokens, under `weights`, which the model holds now: what
        `answer` would give."""
        self.weights, self._answering, self._halved = weights, [], False
        return self._loglikelihood_tokens([(None, list(context), list(rest)) for context, rest in asked])

    @contextmanager
    def listening(self) -> Iterator[list[TokenSequence]]:
        """Everything whose log-likelihood is asked for meanwhile, as it is cut for the model."""
        self._heard = heard = list[TokenSequence]()
        try:
            yield heard
        finally:
            self._heard = None

    def written(self, requests: Iterable[Instance]) -> list[TokenSequence]:
        """The responses of requests for text, each after its context; those without a token left out."""
        pairs = (self._encode_pair(request.args[0], request.resps[0]) for request in requests)
        return [self._sequence((None, context, text)) for context, text in pairs if context and text]

    def forget(self) -> None:
        """Drop all hidden states: what is asked next is computed from the first layer on."""
        if self.plain is None:
            self.sets.forget()

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
        self._look_for_changes()
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
            found = [whole(answer) for answer in self._answers(sequences, again=False)]
        except UNFIT as error:
            self._score_plainly(" ".join(str(error).split()))
            return
        for (mine, _), (theirs, _) in zip(found, own, strict=True):
            # NaN is lm-eval's answer too, where the weights give it.
            if not (math.isnan(theirs) or mine == theirs or abs(mine - theirs) <= slack * max(1.0, abs(theirs))):
                self._score_plainly(f"packed, a request has log-likelihood {mine:.6g} instead of {theirs:.6g}")
                return
        self._check_starts(self.sets.passing(sequences).packs, slack)
        if not any(math.isnan(theirs) for theirs, _ in own):  # which tell nothing about the model's code
            self._checked = length

    def _look_for_changes(self) -> None:
        parameters = list(self.model.parameters())
        state = tuple((id(p), 0 if p.is_inference() else p._version) for p in parameters)
        before, named = self._seen
        if state != before and named == self.weights:
            self.forget()
        self._seen = state, dict(self.weights)

    def _check_starts(self, packs: Sequence[Pack], slack: float) -> None:
        """Hold passes that begin within the model to whole ones, which every pass is from then on where they differ."""
        if not self.sets.memory:
            return
        with torch.inference_mode():
            try:
                reason = "" if self._layered.starts_anywhere(packs, slack) else "they would give other numbers"
            except UNFIT as error:
                reason = " ".join(str(error).split()) or type(error).__name__
        if reason:
            self.sets.memory = {}
            logger.warning("scored without the layer cache, its layers cannot be skipped: %s", reason)

    def _score_plainly(self, reason: str) -> None:
        self.plain = reason
        logger.warning("scored plainly, without packing or layer cache: %s", reason)

    def _packed(self, requests: Sequence[Request], following: Following | None = None) -> list[tuple[float, bool]]:
        sequences = [self._sequence(request) for request in requests]
        return [whole(answer) for answer in self._answers(sequences, following=following)]

    def _sequence(self, request: Request) -> TokenSequence:
        _, context, continuation = request
        return sequence_of(context, continuation, self.max_length)

    def _chosen(self, sequences: Sequence[TokenSequence], again: bool) -> list[tuple[int, ...]]:
        """The greedy choice at every target of each sequence; states are kept for those that come `again`."""
        return [answer.chosen for answer in self._answers(sequences, again=again)]

    def _answers(
        self, sequences: Sequence[TokenSequence], *, again: bool = True, following: Following | None = None
    ) -> list[Answer]:
        if again and not self._halved:
            asked = self.sets.lasting(sequences, alone=not self._answering)
        else:
            asked = self.sets.passing(sequences, halved=self._halved)
        order = following.order(asked.packs) if following else None
        found: dict[int, Answer] = {}
        with torch.inference_mode():
            for at, logits in self._layered.swept(asked.packs, asked.cache, self.weights, order):
                answers = answered(asked.packs[at], logits)
                found |= answers
                if following:
                    following.heard({number: whole(answer) for number, answer in answers.items()})
        return [found[number] for number in range(len(sequences))]


def _greedily(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `generate` without what only sampling asks for."""
    return {k: v for k, v in settings.items() if k != "temperature"} | {"do_sample": False}
