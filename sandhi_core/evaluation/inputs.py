"""The first and second moments of what goes into each projection while a model answers questions of a split.

What is found is kept below `inputs/`, a file a source, named by the checkpoint and all that decides its answers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from sandhi_core.checkpoints.side_files import keep, kept
from sandhi_core.errors import EvaluationError, of_model
from sandhi_core.evaluation.evaluator import Evaluator
from sandhi_core.evaluation.importance import Importance
from sandhi_core.evaluation.resident import Resident
from sandhi_core.evaluation.tasks import Suite
from sandhi_core.evaluation.uses import Uses
from sandhi_core.records import Fingerprint, Slot, Split, digest_of
from sandhi_core.rungs.allotment import LADDER_VERSION
from sandhi_core.rungs.grams import BLOCK, Gram, GramSum
from sandhi_core.rungs.residual import Weighting, weighting
from sandhi_core.threads import steady

SAME_INPUT: Mapping[str, str] = {"k": "q", "v": "q", "up": "gate"}
"""Projections that read what another of their layer reads."""

CENTRE = "centre"
"""What the inputs' mean is called in a file of theirs, beside the blocks by number."""

MEMORY = 2 * 2**30
"""Bytes of moments that one pass over the questions collects; a larger model takes several passes."""


class Inputs:
    """Those of one model on its profile split, collected when first asked for. `uses`: what other tensors act on;
    `importance`: how much answers depend on what each tensor produces."""

    def __init__(self, folder: Path, fingerprint: Fingerprint, evaluator: Evaluator) -> None:
        self.key = digest_of([LADDER_VERSION, fingerprint.digest, evaluator.contexts["profile"]])
        self._folder = folder / self.key
        self.uses = Uses(self._folder, fingerprint, evaluator)
        self.importance = Importance(self._folder, fingerprint, evaluator)
        self._model = fingerprint.model
        self._slots = fingerprint.slots
        self._evaluator = evaluator
        self._ready: set[str] = set()
        self._last: dict[bool, tuple[str, Weighting]] = {}

    def gram(self, tensor: str) -> Gram:
        """E[x x^T] of what the slot with this tensor reads. Raises EvaluationError as `input_grams` does."""
        source = read_by(next(slot for slot in self._slots if slot.tensor == tensor), self._slots)
        found = self._kept(source)
        if found is None:
            self._collect()
            found = self._kept(source)
        if found is None:
            raise EvaluationError(
                "what goes into this projection could not be kept",
                model=self._model,
                tensor=source,
                file=str(self._folder),
                remedy="give the artifact root space, and build again",
            )
        return found

    def weighting(self, tensor: str, affine: bool = False) -> Weighting:
        """The same, ready to weigh a difference by. Projections that read the same come one after the other."""
        source = read_by(next(slot for slot in self._slots if slot.tensor == tensor), self._slots)
        if affine not in self._last or self._last[affine][0] != source:
            self._last[affine] = source, weighting(self.gram(tensor), affine)
        return self._last[affine][1]

    def ready(self, importance: bool = False) -> None:
        """Collect now what is missing, and let go of the model: where several models' are needed at once, each is in
        memory by itself. What is all there is not looked for again, and whoever runs the model keeps it. Raises as
        `gram` does, and with `importance` as that does."""
        found = False
        if "moments" not in self._ready and (found := bool(self._missing())):
            self._collect()
        self._ready.add("moments")
        if importance and "importance" not in self._ready:
            found |= self.importance.ready()
            self._ready.add("importance")
        if found:
            self._evaluator.release()

    def _missing(self) -> list[Slot]:
        return [s for s in self._slots if read_by(s, self._slots) == s.tensor and self._kept(s.tensor) is None]

    def _collect(self) -> None:
        missing = self._missing()
        held = self._evaluator.originals()
        with of_model(self._model):
            for source, gram in input_grams(held, self._evaluator.suite, "profile", missing):
                blocks = {f"{number:04d}": block for number, block in enumerate(gram.blocks)}
                keep(self._file(source), {**blocks, CENTRE: gram.centre})

    def _kept(self, source: str) -> Gram | None:
        blocks = kept(self._file(source))
        if blocks is None:
            return None
        centre = blocks.pop(CENTRE)
        return Gram(tuple(block for _, block in sorted(blocks.items())), centre)

    def _file(self, source: str) -> Path:
        return self._folder / f"{source}.safetensors"


def input_grams(
    held: Resident, suite: Suite, split: Split, sources: Sequence[Slot], memory: int = MEMORY, block: int = BLOCK
) -> Iterator[tuple[str, Gram]]:
    """By tensor name of each source: E[x x^T] over the tokens of the split's requests, each token of a packed tree
    once, under the weights that the model holds now; no more than `memory` bytes in a pass, but one source at least.

    Raises EvaluationError where the questions cannot be scored, or none reaches a projection.
    """
    held.answers(suite, split)  # whatever is computed once (checks, drafts) is computed before anything is counted
    for names in _passes(held, [slot.tensor for slot in sources], memory, block):
        held.scorer.forget()
        sums: dict[str, GramSum] = {}
        with _watched(held, names, sums, block), steady(held.model.device):
            held.answers(suite, split)
        for name in names:
            if name not in sums:
                raise EvaluationError(
                    "no question reaches this projection",
                    tensor=name,
                    remedy="set merging.residuals: none and merging.methods: [mean], or give the model questions that "
                    "use it",
                )
            yield name, _finite(name, sums.pop(name).mean())
    held.scorer.forget()


def _finite(name: str, gram: Gram) -> Gram:
    """The moments, if they are numbers. Raises EvaluationError where something infinite was read, or would be in the
    square."""
    if not all(bool(part.isfinite().all()) for part in (*gram.blocks, gram.centre)):
        raise EvaluationError(
            "what goes into this tensor is not finite, or too large to be squared",
            tensor=name,
            remedy="score in float32, or check the weights of this layer and those before it",
        )
    return gram


def read_by(slot: Slot, slots: Sequence[Slot]) -> str:
    """The source of a slot: the tensor of the first slot that reads the same."""
    wanted = SAME_INPUT.get(slot.projection, slot.projection)
    alike = (s.tensor for s in slots if (s.layer, s.component, s.projection) == (slot.layer, slot.component, wanted))
    return next(alike, slot.tensor)


def _passes(held: Resident, names: Sequence[str], memory: int, block: int) -> Iterator[list[str]]:
    taken: list[str] = []
    used = 0
    for name in names:
        width = held.module(name).weight.shape[1]
        size = 4 * width * min(width, block)
        if taken and used + size > memory:
            yield taken
            taken, used = [], 0
        taken.append(name)
        used += size
    if taken:
        yield taken


@contextmanager
def _watched(held: Resident, names: Sequence[str], sums: dict[str, GramSum], block: int) -> Iterator[None]:
    def hook(name: str) -> Any:
        def seen(module: Any, arguments: tuple[Tensor, ...]) -> None:
            (inputs,) = arguments
            sums.setdefault(name, GramSum(inputs.shape[-1], block)).add(inputs)

        return seen

    hooks = [held.module(name).register_forward_pre_hook(hook(name)) for name in names]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
