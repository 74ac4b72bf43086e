"""What a model's plan offers it: every shared tensor it may hold, and the residuals that it may add to each.

The difference of a slot from its shared tensor is decomposed once and kept below `spectra/`, named by all that decides
it; a rung of the ladder then only reads as many directions as it takes.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from sandhi_core.architectures import ARCHITECTURES
from sandhi_core.assignment import Assignment, factor_names
from sandhi_core.checkpoint import Checkpoint
from sandhi_core.evaluation.inputs import Inputs
from sandhi_core.records import Adjustment, Contributor, Fingerprint, Plan, PlannedMerge, Recipe, digest_of
from sandhi_core.rungs.allotment import LADDER_VERSION, Candidate, Ranks
from sandhi_core.rungs.plain import plain_squares
from sandhi_core.rungs.residual import Residual, spectrum
from sandhi_core.side_files import keep, kept
from sandhi_core.store import Store

ALL = 2**31
"""As a largest rank: whatever pays."""


@dataclass(frozen=True)
class Offer:
    """A shared tensor for one slot, by its digest, and the file with the spectrum of the slot's difference from it (of
    what is no projection: with its error alone)."""

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
        """By tensor name (of all, or `only` some), in the order of the fingerprint. Raises what making a tensor
        or collecting the inputs raises."""
        merges = {m.tensor: m for step in plan.steps for m in step.merges if only is None or m.tensor in only}
        names = [name for name in self._fingerprint.in_order if name in merges]
        offers, begun, last = {}, time.monotonic(), time.monotonic()
        for done, name in enumerate(names, 1):
            offers[name] = self._offer(merges[name])
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

    def _offer(self, merge: PlannedMerge) -> Offer:
        shared = self._shared(merge.recipe)
        own = self._fingerprint.tensor(merge.tensor)
        key = digest_of([LADDER_VERSION, own.digest, shared, self._inputs.key, merge.tensor])
        file = self._folder / f"{key}.safetensors"
        found = kept(file)
        if found is None:
            found = self._compared(merge.tensor, shared, own.nbytes)
            keep(file, found)
        squares = found["squares"].numpy()
        limit = min(self._largest, len(found["down"])) if "down" in found else 0
        shape = own.shape if len(own.shape) == 2 else (*own.shape, 1)
        return Offer(shared, Candidate(squares, shape, _spared(merge, self._fingerprint.model), limit), file)

    def _compared(self, name: str, shared: str, limit: int) -> dict[str, Tensor]:
        """What is kept of the difference of a tensor from a shared one; `limit`: bytes of directions."""
        own, with_it = self._checkpoint.tensor(name), self._store.tensor(shared)
        if any(slot.tensor == name for slot in self._fingerprint.slots):
            return spectrum(own, with_it, self._inputs.weighting(name)).kept(limit)
        norm = own.ndim == 1 and name.endswith(".weight")
        offset = 1.0 if norm and ARCHITECTURES[self._fingerprint.model_type].norm == "1+w" else 0.0
        return {"squares": plain_squares(own, with_it, self._inputs.uses.of(name), offset)}


TOLD_EVERY = 30.0
"""Seconds between two lines about how far it is."""


def _spared(merge: PlannedMerge, model: str) -> float:
    """Bytes: of n contributors' matrices one is kept, which each of them pays in part; a model that only joins a tensor
    spares all of its own."""
    contributors: tuple[Contributor, ...] = merge.recipe.contributors
    count = len({c.model for c in contributors})
    return merge.nbytes * ((count - 1) / count if any(c.model == model for c in contributors) else 1.0)
