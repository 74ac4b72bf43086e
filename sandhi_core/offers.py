"""What a model's plan offers it: every shared tensor it may hold, and the residuals that it may add to each.

The difference of a slot from its shared tensor is decomposed once and kept below `spectra/`, named by all that decides
it; a rung of the ladder then only reads as many directions as it takes.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sandhi_core.assignment import Assignment, factor_names, vector_names
from sandhi_core.checkpoints.architectures import ARCHITECTURES
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.side_files import keep, kept
from sandhi_core.errors import MergeError
from sandhi_core.evaluation.inputs import Inputs
from sandhi_core.evaluation.plain import plain_squares
from sandhi_core.files import writing
from sandhi_core.records import Adjustment, Fingerprint, Plan, Recipe, digest_of
from sandhi_core.rungs.allotment import LADDER_VERSION, Bid, Candidate, Ranks, nbytes
from sandhi_core.rungs.residual import Residual, cut, spectrum
from sandhi_core.savings import worth_a_file
from sandhi_core.store import Store

ALL = 2**31
"""As a largest rank: whatever pays."""


@dataclass(frozen=True)
class Offer:
    """A shared tensor for one slot, by its digest, and the file with the spectrum of the slot's difference from it (of
    what is no projection: with its error alone); `scaled`: that of what differs once rows are scaled and shifted.
    `found` reads the one or, given True, the other, and makes it again where another pool of the root has removed
    it."""

    shared: str
    candidate: Candidate
    file: Path
    found: Callable[[bool], Mapping[str, Tensor]]
    scaled: Path | None = None

    def residual(self, bid: Bid) -> Residual:
        return cut(self.found(bid.affine), bid.rank)


class Offers:
    """Those of one model's plan. `folder` is where spectra are kept, `shared` gives the digest of a recipe's tensor,
    `largest` is the rank that no residual goes beyond (0: none is offered), `affine` whether rows are scaled and
    shifted where that pays, `answers` whether errors count as much as the model's answers depend on the outputs."""

    def __init__(
        self,
        folder: Path,
        fingerprint: Fingerprint,
        checkpoint: Checkpoint,
        inputs: Inputs,
        store: Store,
        shared: Callable[[Recipe], str],
        largest: int = ALL,
        affine: bool = False,
        answers: bool = False,
    ) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._projections = {slot.tensor for slot in fingerprint.slots}
        self._checkpoint = checkpoint
        self._inputs = inputs
        self._store = store
        self._shared = shared
        self._largest = largest
        self._affine = affine
        self._answers = answers

    def of(
        self, plan: Plan, only: Collection[str] | None = None, told: Callable[[str], None] = lambda line: None
    ) -> dict[str, Offer]:
        """By tensor name (of all, or `only` some), in the order of the fingerprint. Raises what making a tensor
        or collecting the inputs raises."""
        merges = {m.tensor: m for step in plan.steps for m in step.merges if only is None or m.tensor in only}
        names = [name for name in self._fingerprint.in_order if name in merges]
        offers, begun, last = {}, time.monotonic(), time.monotonic()
        for done, name in enumerate(names, 1):
            offers[name] = self.offer(name, merges[name].recipe)
            if time.monotonic() - last > TOLD_EVERY:
                last = time.monotonic()
                left = (last - begun) / done * (len(names) - done)
                told(f"{plan.model}: {done} of {len(names)} matrices decomposed, about {left:.0f} s left")
        return offers

    def assigned(self, offers: Mapping[str, Offer], ranks: Ranks) -> Assignment:
        """The assignment of these ranks, its residuals in the store."""
        adjustments = {}
        for name, bid in ranks.items():
            if bid.rank or bid.affine:
                adjustments[name] = self.adjustment(name, offers[name].residual(bid))
        return Assignment({name: offers[name].shared for name in ranks}, adjustments)

    def adjustment(self, name: str, residual: Residual) -> Adjustment:
        """A residual of the tensor `name`, kept in the store."""
        parts = dict(zip(factor_names(name), (residual.down, residual.up), strict=True))
        parts |= zip(vector_names(name), (residual.scale, residual.shift), strict=True)
        digests = ("" if part is None else self._store.put(one, part) for one, part in parts.items())
        down, up, scale, shift = digests
        return Adjustment(
            kind="affine" if scale else "low_rank",
            nbytes=residual.nbytes,
            rank=residual.rank,
            down=down,
            up=up,
            scale=scale,
            shift=shift,
        )

    def offer(self, name: str, recipe: Recipe) -> Offer:
        """A recipe's tensor in place of the one with this name. Raises what making it or collecting the inputs
        raises."""
        shared = self._shared(recipe)
        if name not in self._projections:
            file, found = self._kept(name, shared, lambda own, with_it: {"squares": self._plain(name, own, with_it)})
            shape, spared = (*recipe.shape, 1)[:2], self._spared(name, recipe)
            bids = Candidate(self._counted(name, found["squares"]), shape, spared, limit=0)
            return Offer(shared, bids, file, lambda affine: found)
        again = lambda affine: self._spectrum(name, shared, affine)[1]  # noqa: E731
        file, found = self._spectrum(name, shared, affine=False)
        candidate = self._candidate(name, recipe, found["squares"])
        if not self._affine:
            return Offer(shared, candidate, file, again)
        scaled, found = self._spectrum(name, shared, affine=True)
        return Offer(shared, replace(candidate, affine=self._counted(name, found["squares"])), file, again, scaled)

    def candidate(self, name: str, recipe: Recipe) -> Candidate:
        """What `offer` would have a projection bid but for scale and shift, which are not asked for: after `shorten`
        too."""
        own = self._fingerprint.tensor(name)
        if own.digest == recipe.taken:  # nothing differs
            return self._candidate(name, recipe, torch.zeros(min(own.shape), dtype=torch.float64))
        shared = self._shared(recipe)
        found = kept(short_file(self._file(name, shared)))
        if found is None:
            _, found = self._spectrum(name, shared, affine=False)
        return self._candidate(name, recipe, found["squares"])

    def shorten(self, name: str, recipe: Recipe) -> None:
        """Keep of a spectrum that is not to be used only what bids need: it takes as much as the slot itself."""
        file = self._file(name, self._shared(recipe))
        if found := kept(file):
            keep(short_file(file), {"squares": found["squares"]})
            with writing(file):
                file.unlink(missing_ok=True)

    def _candidate(self, name: str, recipe: Recipe, squares: Tensor) -> Candidate:
        own = self._fingerprint.tensor(name)
        limit = min(self._largest, len(squares), own.nbytes // nbytes(own.shape, 1))  # directions that are kept
        return Candidate(self._counted(name, squares), own.shape, self._spared(name, recipe), limit)

    def _counted(self, name: str, squares: Tensor) -> npt.NDArray[np.float64]:
        counts = self._inputs.importance.of(name) if self._answers else 1.0
        counted: npt.NDArray[np.float64] = counts * squares.numpy()
        return counted

    def _spared(self, name: str, recipe: Recipe) -> float:
        """Bytes: of n tensors one is kept, which each of those who pay for it pays in part (so that the owner of a
        tensor that is taken as it is spares nothing); a model that only joins a tensor spares all of its own. What gets
        no file of its own spares nobody anything."""
        size, model = self._fingerprint.tensor(name).nbytes, self._fingerprint.model
        if not worth_a_file(size, len(recipe.shape) == 1):
            return 0.0
        payers = set(recipe.payers) or {c.model for c in recipe.contributors}
        return size * ((len(payers) - 1) / len(payers) if model in payers else 1.0)

    def _spectrum(self, name: str, shared: str, affine: bool) -> tuple[Path, dict[str, Tensor]]:
        limit = self._fingerprint.tensor(name).nbytes  # bytes of directions that may be worth keeping

        def decomposed(own: Tensor, with_it: Tensor) -> dict[str, Tensor]:
            return spectrum(own, with_it, self._inputs.weighting(name, affine)).kept(limit)

        return self._kept(name, shared, decomposed, *["affine"] * affine)

    def _plain(self, name: str, own: Tensor, shared: Tensor) -> Tensor:
        norm = own.ndim == 1 and name.endswith(".weight")
        offset = 1.0 if norm and ARCHITECTURES[self._fingerprint.model_type].norm == "1+w" else 0.0
        return plain_squares(own, shared, self._inputs.uses.of(name), offset)

    def _kept(
        self, name: str, shared: str, compared: Callable[[Tensor, Tensor], dict[str, Tensor]], *how: str
    ) -> tuple[Path, dict[str, Tensor]]:
        """What is kept of the difference of a tensor from a shared one, made where it is not there."""
        file = self._file(name, shared, *how)
        found = kept(file)
        if found is None:
            found = compared(self._checkpoint.tensor(name), self._store.tensor(shared))
            if any(bool(part.isnan().any()) for part in found.values()):
                raise MergeError(
                    "its difference from the shared tensor is no number: both are too large to be compared",
                    model=self._fingerprint.model,
                    tensor=name,
                    remedy="leave this model out of the pool, or set merging.residuals: none",
                )
            keep(file, found)
        return file, found

    def _file(self, name: str, shared: str, *how: str) -> Path:
        own = self._fingerprint.tensor(name).digest
        return self._folder / spectrum_file(own, shared, self._inputs.key, name, *how)


def spectrum_file(own: str, shared: str, inputs: str, name: str, *how: str) -> str:
    """What the file with the spectrum of a tensor's difference from a shared one is called: `own` and `shared` are
    their digests, `inputs` is the key of the inputs that weigh it, `name` the tensor's, `how` ("affine") once rows are
    scaled and shifted."""
    return f"{digest_of([LADDER_VERSION, own, shared, inputs, name, *how])}.safetensors"


TOLD_EVERY = 30.0
"""Seconds between two lines about how far it is."""


def short_file(file: Path) -> Path:
    """Beside a spectrum, or in its place, what of it bids need."""
    return file.with_suffix(".squares")
