"""Greedy outputs of changed weights, from the outputs of weights before: checked in one pass, decoded only where the
changed weights choose another token.

Source of checking a draft in parallel: blockwise parallel and speculative decoding (Stern et al., 2018; Leviathan et
al., 2023); greedy, so the result is token for token what decoding from scratch gives.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerationMode

from sandhi_core.evaluation.packing import TokenSequence

Tokens = tuple[int, ...]

UNSETTLED = 0.6
"""Drafts that were formed again are once more as long as no larger share of them is left unsettled by their check."""


class Drafts:
    """Keeps the first output of every context as its draft. `chosen` gives the greedy choices of the weights that the
    model holds now, one for each target of each sequence; of sequences that will be asked again, where it is told so.
    `border`: tokens of a sequence beyond which the model sees all of it otherwise, so that one pass is not decoding.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        chosen: Callable[[Sequence[TokenSequence], bool], list[Tokens]],
        batch_tokens: int,
        border: float = math.inf,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._chosen = chosen
        self._batch_tokens = batch_tokens
        self._border = border
        self._drafts: dict[tuple[Tokens, str], Tokens | None] = {}  # None: not to be had from checking
        self._stops: dict[str, list[int]] = {}
        self.decoded = 0  # outputs that were decoded, in part or whole

    def outputs(
        self, contexts: Sequence[Tokens], room: int, stop: Sequence[str], settings: Mapping[str, Any]
    ) -> list[Tokens]:
        """At most `room` tokens after each context, up to and with what ends it: the end of text or a `stop` text."""
        likeliest = self._takes_the_likeliest(settings)
        apart = {at: () for at, c in enumerate(contexts) if not likeliest or len(c) + room > self._border}
        found = self._decoded(contexts, apart, room, stop, settings, alike=True)
        kind = repr((room, list(stop), sorted(settings.items())))
        keys = {at: (context, kind) for at, context in enumerate(contexts) if at not in apart}
        known = {at: self._drafts.get(key, ()) for at, key in keys.items()}
        settled, begun = self._settled(contexts, {at: draft for at, draft in known.items() if draft}, room, stop)
        begun |= {at: () for at, draft in known.items() if not draft}
        fresh = self._decoded(contexts, begun, room, stop, settings)
        self._remember(keys, contexts, {at: out for at, out in fresh.items() if known[at] == ()})
        found |= settled | fresh
        return [found[at] for at in range(len(contexts))]

    def is_greedy(self, settings: Mapping[str, Any]) -> bool:
        """Whether outputs are decoded token by token, each row on its own: no beams, no other model's help."""
        mode: GenerationMode = self._generation(settings).get_generation_mode()
        return mode is GenerationMode.GREEDY_SEARCH

    def _takes_the_likeliest(self, settings: Mapping[str, Any]) -> bool:
        """Whether every token is the likeliest. Penalties, least lengths and suchlike, of the task or the checkpoint,
        may agree with that under some weights and not under others, so no draft can stand for them."""
        return not self._model._get_logits_processor(
            self._generation(settings), input_ids_seq_length=1, encoder_input_ids=torch.zeros(1, 1, dtype=torch.int64)
        )

    def _generation(self, settings: Mapping[str, Any]) -> Any:
        """What `generate` would make of the checkpoint's generation config and `settings`."""
        config, _ = self._model._prepare_generation_config(None, **settings)
        self._model._prepare_special_tokens(config, True, device=self._model.device)
        return config

    def _settled(
        self, contexts: Sequence[Tokens], drafts: Mapping[int, Tokens], room: int, stop: Sequence[str]
    ) -> tuple[dict[int, Tokens], dict[int, Tokens]]:
        """The outputs that checking gives, and the beginnings of those that must be decoded.

        Where the weights choose another token, the rest of the draft is tried after that token: most differences are
        a word in a sentence that goes on alike. As long as this settles enough, it costs less than decoding.
        """
        found: dict[int, Tokens] = {}
        begun: dict[int, Tokens] = {}
        again = False
        while drafts:
            redrafted: dict[int, Tokens] = {}
            for at, choices in self._choices(contexts, drafts, again=again).items():
                draft = drafts[at]
                same = next((i for i, token in enumerate(draft) if choices[i] != token), len(draft))
                out = draft[:same] + choices[same : same + 1]
                # What follows a changed token may end it elsewhere: a stop text that spans both, or no longer does.
                sure = begun.get(at, out[:-1])
                out = self._cut(sure, out[len(sure) :], stop)
                if len(out) == room or self.ended([out], stop)[0]:
                    found[at] = out
                    continue
                begun[at] = out
                if len(out) < len(draft):
                    redrafted[at] = out + draft[len(out) :]
            if again and len(redrafted) > UNSETTLED * len(drafts):
                break
            drafts, again = redrafted, True
        return found, {at: out for at, out in begun.items() if at not in found}

    def _choices(
        self, contexts: Sequence[Tokens], drafts: Mapping[int, Tokens], *, again: bool = False
    ) -> dict[int, Tokens]:
        """By context, what is chosen at every place of its draft if all before it is the draft's. Only the first
        drafts are checked under further weights; those that were formed `again` are not."""
        which = sorted(drafts)
        sequences = [TokenSequence(contexts[at] + drafts[at][:-1], drafts[at]) for at in which]
        return dict(zip(which, self._chosen(sequences, not again), strict=True)) if sequences else {}

    def _remember(self, keys: Mapping[int, Any], contexts: Sequence[Tokens], fresh: Mapping[int, Tokens]) -> None:
        """Keep new outputs as drafts if checking them, under the very weights that gave them, agrees: a model of which
        one pass says something else than decoding shows there."""
        for at, choices in self._choices(contexts, {at: out for at, out in fresh.items() if out}).items():
            self._drafts[keys[at]] = fresh[at] if choices == fresh[at] else None

    def _decoded(
        self,
        contexts: Sequence[Tokens],
        begun: Mapping[int, Tokens],
        room: int,
        stop: Sequence[str],
        settings: Mapping[str, Any],
        *,
        alike: bool = False,
    ) -> dict[int, Tokens]:
        """Whole outputs of the contexts that `begun` names, decoded after what is given of them there; `alike`: only
        those of one length together, where padding or a longer one beside it could move an output."""
        self.decoded += len(begun)
        prefixes = {at: contexts[at] + out for at, out in begun.items()}
        # No row may go on to a place that none of them has alone: positions end there, or the model's scaling changes.
        most = max((len(contexts[at]) for at in begun), default=0) + room
        left = sorted(prefixes, key=lambda at: (-len(prefixes[at]), prefixes[at], at))
        found: dict[int, Tokens] = {}
        while left:
            width = len(prefixes[left[0]])
            fit = [at for at in left if len(prefixes[at]) == width or not alike]
            fit = [at for at in fit if width + room - len(begun[at]) <= most]
            batch = fit[: max(1, self._batch_tokens // (width + room))]
            left = [at for at in left if at not in set(batch)]
            starts = [begun[at] for at in batch]
            decoded = self._continued([prefixes[at] for at in batch], starts, room, stop, settings)
            for at, start, more in zip(batch, starts, decoded, strict=True):
                found[at] = self._cut(start, more[: room - len(start)], stop)
        return found

    def _continued(
        self,
        prefixes: Sequence[Tokens],
        begun: Sequence[Tokens],
        room: int,
        stop: Sequence[str],
        settings: Mapping[str, Any],
    ) -> list[Tokens]:
        width, device = max(map(len, prefixes)), self._model.device
        padding = self._tokenizer.pad_token_id
        padded = torch.tensor([[padding] * (width - len(p)) + list(p) for p in prefixes], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prefixes], device=device)
        whole = self._model.generate(
            input_ids=padded,
            attention_mask=mask,
            max_new_tokens=room - min(map(len, begun)),
            stopping_criteria=StoppingCriteriaList([_Ended(self, begun, width, stop)]),
            pad_token_id=padding,
            use_cache=True,
            **settings,
        )
        return [tuple(row) for row in whole[:, width:].tolist()]

    def _cut(self, begun: Tokens, more: Tokens, stop: Sequence[str]) -> Tokens:
        """`begun`, which has not ended, and `more` of it up to the token that ends it."""
        for length in range(1, len(more) + 1):
            out = begun + more[:length]
            if self.ended([out], stop)[0]:
                return out
        return begun + more

    def ended(self, outputs: Sequence[Tokens], stop: Sequence[str]) -> list[bool]:
        """Whether the last token of each ends it: the end of text, or the last of a stop text."""
        ends = self._model.generation_config.eos_token_id
        ends = set(ends) if isinstance(ends, list) else {ends}
        # As many last tokens as lm-eval looks at: a stop text may be spelt in other tokens than its own.
        tail = 2 + max((len(self._encoded(text)) for text in stop), default=0)
        texts = self._tokenizer.batch_decode([out[-tail:] for out in outputs]) if stop else [""] * len(outputs)
        found = (any(text in tail for text in stop) for tail in texts)
        return [out[-1] in ends or stopped for out, stopped in zip(outputs, found, strict=True)]

    def _encoded(self, text: str) -> list[int]:
        if text not in self._stops:
            self._stops[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._stops[text]


class _Ended(StoppingCriteria):  # type: ignore[misc]
    """Ends each row on its own, whatever the others still need."""

    def __init__(self, drafts: Drafts, begun: Sequence[Tokens], width: int, stop: Sequence[str]) -> None:
        self._drafts = drafts
        self._begun = begun
        self._width = width
        self._stop = stop

    def __call__(self, input_ids: Tensor, scores: Any, **named: Any) -> Tensor:
        rows = input_ids[:, self._width :].tolist()
        outputs = [(*b, *row) for b, row in zip(self._begun, rows, strict=True)]
        return torch.tensor(self._drafts.ended(outputs, self._stop), device=input_ids.device)
