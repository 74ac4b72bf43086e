"""Sequences that are asked under weights after weights: packed once, with the hidden states that are kept of them."""

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sandhi_core.evaluation.layers import LayerCache
from sandhi_core.evaluation.packing import Pack, TokenSequence, cheapest, pack


@dataclass(frozen=True)
class PackedSet:
    """Sequences in their packs, and the states of these."""

    packs: list[Pack]
    cache: LayerCache
    nbytes: int = 0  # that the states take, all layers kept


class Hidden(NamedTuple):
    """A model's hidden states: elements, the bytes of one, and how many layers they go through."""

    width: int
    itemsize: int
    layers: int


class PackedSets:
    """The sets of one model. `batch_tokens`: of a pack at most; `border`: as in packing.pack. `memory`: bytes that all
    states together may take, by the device they live on; of devices that hold as many layers the first. What comes
    first has the first choice."""

    def __init__(self, hidden: Hidden, batch_tokens: int, border: float, memory: Mapping[str, int]) -> None:
        self._hidden = hidden
        self._batch_tokens = batch_tokens
        self._border = border
        self.memory = memory
        self.kept: dict[bytes, PackedSet] = {}

    def lasting(self, sequences: Sequence[TokenSequence], *, alone: bool) -> PackedSet:
        """The set of `sequences`, kept until `forget`; `alone`: instead of all that was kept before."""
        key = _key(sequences)
        if key not in self.kept:
            if alone:
                self.forget()
            self.kept[key] = self._with_states(self._packs(sequences, 1))
        return self.kept[key]

    def passing(self, sequences: Sequence[TokenSequence], *, halved: bool = False) -> PackedSet:
        """A set of which nothing is kept; `halved`: in packs of half the size."""
        return PackedSet(self._packs(sequences, 2 if halved else 1), LayerCache(()))

    def forget(self) -> None:
        """Drop all sets with their states."""
        self.kept.clear()

    def _packs(self, sequences: Sequence[TokenSequence], parts: int) -> list[Pack]:
        budget, packs = cheapest(sequences, self._hidden.width, self._batch_tokens, self._border)
        return packs if parts == 1 else pack(sequences, max(1, budget // parts), self._border)

    def _with_states(self, packs: list[Pack]) -> PackedSet:
        """Every so many layers that kept and tried states, each before and within a layer, fit where most do."""
        width, itemsize, count = self._hidden
        one = 4 * sum(len(p.parents) for p in packs) * width * itemsize
        taken: dict[str, int] = defaultdict(int)
        for found in self.kept.values():
            taken[found.cache.device] += found.nbytes
        fitting = {d: min(max(most - taken[d], 0) // max(one, 1), count) for d, most in self.memory.items()}
        device = max(fitting, key=lambda place: fitting[place], default="cpu")
        most = fitting.get(device, 0)
        layers = range(0, count, -(-count // most)) if most else range(0)
        return PackedSet(packs, LayerCache(layers, device), one * len(layers))


def _key(sequences: Sequence[TokenSequence]) -> bytes:
    digest = hashlib.sha256()
    for one in sequences:
        digest.update(array("q", [len(one.tokens), len(one.targets), *one.tokens, *one.targets]).tobytes())
    return digest.digest()
