"""Greedy outputs of changed weights, from the outputs of weights before: checked in one pass, decoded only where the
changed weights choose another token.

Source of checking a draft in parallel: blockwise parallel and speculative decoding (Stern et al., 2018; Leviathan et
al., 2023); greedy, so the result is token for token what decoding from scratch gives.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from sandhi_core.evaluation.packing import Scored

Tokens = tuple[int, ...]

UNSETTLED = 0.6
"""Drafts are formed again as long as no larger share of them is left unsettled by a check."""


class Drafts:
    """Keeps the first output of every context as its draft. `chosen` gives the greedy choices of the weights that the
    model holds now, one for each target of each sequence; of sequences that will be asked again, where it is told so.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        chosen: Callable[[Sequence[Scored], bool], list[Tokens]],
        batch_tokens: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._chosen = chosen
        self._batch_tokens = batch_tokens
        self._drafts: dict[tuple[Tokens, str], Tokens | None] = {}  # None: not to be had from checking
        self._stops: dict[str, list[int]] = {}
        self.decoded = 0  # outputs that were decoded, in part or whole

    def outputs(
        self, contexts: Sequence[Tokens], room: int, stop: Sequence[str], settings: Mapping[str, Any]
    ) -> list[Tokens]:
        """At most `room` tokens after each context, up to and with what ends it: the end of text or a `stop` text."""
        kind = repr((room, list(stop), sorted(settings.items())))
        keys = [(context, kind) for context in contexts]
        known = [self._drafts.get(key, ()) for key in keys]
        found, begun = self._settled(contexts, {at: draft for at, draft in enumerate(known) if draft}, room, stop)
        begun |= {at: () for at, draft in enumerate(known) if not draft}
        fresh = self._decoded(contexts, begun, room, stop, settings)
        self._remember(keys, contexts, {at: out for at, out in fresh.items() if known[at] == ()})
        found |= fresh
        return [found[at] for at in range(len(contexts))]

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
                if same == len(draft) or len(out) == room or self.ended([out], stop)[0]:
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
        sequences = [Scored(contexts[at] + drafts[at][:-1], drafts[at]) for at in which]
        return dict(zip(which, self._chosen(sequences, not again), strict=True)) if sequences else {}

    def _remember(self, keys: Sequence[Any], contexts: Sequence[Tokens], fresh: Mapping[int, Tokens]) -> None:
        """Keep new outputs as drafts if checking them, under the very weights that gave them, agrees: penalties and
        other settings that move the choice away from the likeliest token show there."""
        for at, choices in self._choices(contexts, {at: out for at, out in fresh.items() if out}).items():
            self._drafts[keys[at]] = fresh[at] if choices == fresh[at] else None

    def _decoded(
        self,
        contexts: Sequence[Tokens],
        begun: Mapping[int, Tokens],
        room: int,
        stop: Sequence[str],
        settings: Mapping[str, Any],
    ) -> dict[int, Tokens]:
        """Whole outputs of the contexts that `begun` names, decoded after what is given of them there."""
        self.decoded += len(begun)
        prefixes = {at: contexts[at] + out for at, out in begun.items()}
        longest_first = sorted(prefixes, key=lambda at: (-len(prefixes[at]), prefixes[at], at))
        found: dict[int, Tokens] = {}
        while longest_first:
            size = max(1, self._batch_tokens // (len(prefixes[longest_first[0]]) + room))
            batch, longest_first = longest_first[:size], longest_first[size:]
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
