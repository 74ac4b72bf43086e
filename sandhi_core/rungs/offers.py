"""What a model's plan offers it: every shared tensor it may hold, and the residuals that it may add to each.

The difference of a slot from its shared tensor is decomposed once and kept below `spectra/`, named by all that decides
it; a rung of the ladder then only reads as many directions as it takes.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from sandhi_core.assignment import Assignment, factor_names
from sandhi_core.checkpoint import Checkpoint
from sandhi_core.evaluation.inputs import Inputs
from sandhi_core.records import Adjustment, Fingerprint, Plan, Recipe, digest_of
from sandhi_core.rungs.allotment import LADDER_VERSION, Candidate, Ranks, nbytes
from sandhi_core.rungs.residual import Residual, spectrum
from sandhi_core.side_files import keep, kept
from sandhi_core.store import Store

ALL = 2**31
"""As a largest rank: whatever pays."""


@dataclass(frozen=True)
class Offer:
    """A shared tensor for one slot, by its digest, and the file with the spectrum of the slot's difference from it."""

    shared: str
    candidate: Candidate
    file: Path

    def residual(self, rank: int) -> Residual:
        found = kept(self.file) or {}
        return Residual(found["up"][:, :rank].contiguous(), found["down"][:rank].contiguous())


class Offers:
    """Those of one model's plan. `folder` is where spectra are kept, `shared` gives the digest of a recipe's tensor,
    `largest` is the rank that no residual goes beyond (0: none is offered)."""

    def __init__(
        self,
        folder: Path,
        fingerprint: Fingerprint,
        checkpoint: Checkpoint,
        inputs: Inputs,
        store: Store,
        shared: Callable[[Recipe], str],
        largest: int = ALL,
    ) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._checkpoint = checkpoint
        self._inputs = inputs
        self._store = store
        self._shared = shared
        self._largest = largest

    def of(
        self, plan: Plan, only: Collection[str] | None = None, told: Callable[[str], None] = lambda line: None
    ) -> dict[str, Offer]:
        """By tensor name (of all, or `only` some), in the order of the fingerprint's slots. Raises what making a tensor
        or collecting the inputs raises."""
        merges = {m.tensor: m for step in plan.steps for m in step.merges if only is None or m.tensor in only}
        names = [slot.tensor for slot in self._fingerprint.slots if slot.tensor in merges]
        offers, begun, last = {}, time.monotonic(), time.monotonic()
        for done, name in enumerate(names, 1):
            offers[name] = self.offer(merges[name].tensor, merges[name].recipe)
            if time.monotonic() - last > TOLD_EVERY:
                last = time.monotonic()
                left = (last - begun) / done * (len(names) - done)
                told(f"{plan.model}: {done} of {len(names)} matrices decomposed, about {left:.0f} s left")
        return offers

    def assigned(self, offers: Mapping[str, Offer], ranks: Ranks) -> Assignment:
        """The assignment of these ranks, its residuals in the store."""
        adjustments = {}
        for name, rank in ranks.items():
            if rank:
                adjustments[name] = self.adjustment(name, offers[name].residual(rank))
        return Assignment({name: offers[name].shared for name in ranks}, adjustments)

    def adjustment(self, name: str, residual: Residual) -> Adjustment:
        """A residual of the tensor `name`, kept in the store."""
        down, up = factor_names(name)
        return Adjustment(
            kind="low_rank",
            nbytes=residual.nbytes,
            rank=residual.rank,
            down=self._store.put(down, residual.down),
            up=self._store.put(up, residual.up),
        )

    def offer(self, tensor: str, recipe: Recipe) -> Offer:
        """A recipe's tensor for the slot with this one. Raises what making it or collecting the inputs raises."""
        shared, file = self._shared(recipe), self._file(tensor, recipe)
        found = kept(file)
        if found is None:
            own_matrix, with_it = self._checkpoint.tensor(tensor), self._store.tensor(shared)
            own = self._fingerprint.tensor(tensor)
            found = spectrum(own_matrix, with_it, self._inputs.weighting(tensor)).kept(own.nbytes)
            keep(file, found)
        return Offer(shared, self._candidate(tensor, recipe, found["squares"]), file)

    def candidate(self, tensor: str, recipe: Recipe) -> Candidate:
        """What `offer` would have the slot bid, after `shorten` too."""
        found = kept(_short(self._file(tensor, recipe)))
        if found is None:
            return self.offer(tensor, recipe).candidate
        return self._candidate(tensor, recipe, found["squares"])

    def shorten(self, tensor: str, recipe: Recipe) -> None:
        """Keep of a spectrum that is not to be used only what bids need: it takes as much as the slot itself."""
        file = self._file(tensor, recipe)
        if found := kept(file):
            keep(_short(file), {"squares": found["squares"]})
            file.unlink()

    def _file(self, tensor: str, recipe: Recipe) -> Path:
        own = self._fingerprint.tensor(tensor).digest
        key = digest_of([LADDER_VERSION, own, self._shared(recipe), self._inputs.key, tensor])
        return self._folder / f"{key}.safetensors"

    def _candidate(self, tensor: str, recipe: Recipe, squares: Tensor) -> Candidate:
        own = self._fingerprint.tensor(tensor)
        limit = min(self._largest, len(squares), own.nbytes // nbytes(own.shape, 1))
        return Candidate(squares.numpy(), own.shape, _spared(own.nbytes, recipe, self._fingerprint.model), limit)


TOLD_EVERY = 30.0
"""Seconds between two lines about how far it is."""


def _short(file: Path) -> Path:
    return file.with_suffix(".squares")


def _spared(size: int, recipe: Recipe, model: str) -> float:
    """Bytes, of a slot of that size: of n matrices one is kept, which each of those who pay for it pays in part (so
    that the owner of a tensor that is taken as it is spares nothing); a model that only joins a tensor spares all of
    its own."""
    payers = set(recipe.payers) or {c.model for c in recipe.contributors}
    return size * ((len(payers) - 1) / len(payers) if model in payers else 1.0)
