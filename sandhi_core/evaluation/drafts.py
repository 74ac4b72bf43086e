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


class Drafts:
    """Keeps the first output of every context as its draft. `agreeing` gives how many leading targets of each sequence
    are the greedy choices of the weights that the model holds now."""

    def __init__(
        self, model: Any, tokenizer: Any, agreeing: Callable[[Sequence[Scored]], list[int]], batch_tokens: int
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._agreeing = agreeing
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
        found = dict(enumerate(known))
        prefixes = {at: contexts[at] for at, draft in found.items() if not draft}
        checked = [at for at, draft in found.items() if draft]
        for at, agreed in zip(checked, self._checked(contexts, found, checked), strict=True):
            if agreed < len(found[at] or ()):
                prefixes[at] = contexts[at] + (found[at] or ())[:agreed]
        fresh = self._decoded(contexts, prefixes, room, stop, settings)
        found |= fresh
        self._remember(keys, contexts, {at: out for at, out in fresh.items() if known[at] == ()})
        return [found[at] or () for at in range(len(contexts))]

    def _checked(
        self, contexts: Sequence[Tokens], drafts: Mapping[int, Tokens | None], which: Sequence[int]
    ) -> list[int]:
        sequences = []
        for at in which:
            draft = drafts[at] or ()
            sequences.append(Scored(contexts[at] + draft[:-1], draft))
        return self._agreeing(sequences) if sequences else []

    def _remember(self, keys: Sequence[Any], contexts: Sequence[Tokens], fresh: Mapping[int, Tokens]) -> None:
        """Keep new outputs as drafts if checking them, under the very weights that gave them, agrees: penalties and
        other settings that move the choice away from the likeliest token show there."""
        which = sorted(at for at, out in fresh.items() if out)
        for at, agreed in zip(which, self._checked(contexts, fresh, which), strict=True):
            self._drafts[keys[at]] = fresh[at] if agreed == len(fresh[at]) else None

    def _decoded(
        self,
        contexts: Sequence[Tokens],
        prefixes: Mapping[int, Tokens],
        room: int,
        stop: Sequence[str],
        settings: Mapping[str, Any],
    ) -> dict[int, Tokens]:
        """Whole outputs of the contexts in `prefixes`, decoded after these."""
        self.decoded += len(prefixes)
        longest_first = sorted(prefixes, key=lambda at: (-len(prefixes[at]), prefixes[at], at))
        found: dict[int, Tokens] = {}
        while longest_first:
            size = max(1, self._batch_tokens // (len(prefixes[longest_first[0]]) + room))
            batch, longest_first = longest_first[:size], longest_first[size:]
            begun = [prefixes[at][len(contexts[at]) :] for at in batch]
            decoded = self._continued([prefixes[at] for at in batch], begun, room, stop, settings)
            for at, start, more in zip(batch, begun, decoded, strict=True):
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
