"""The models of a pool file, ready to be scored, and what each may share with the others."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor

from sandhi_core.checkpoint import Checkpoint, resolve
from sandhi_core.evaluation.evaluator import Evaluator, Weights, weights_key
from sandhi_core.evaluation.inputs import input_grams
from sandhi_core.evaluation.resident import Resident
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.merging import merge
from sandhi_core.pool import ModelEntry, Pool
from sandhi_core.records import Contributor, Evaluation, Fingerprint, Recipe, Scores, Slot, Split
from sandhi_core.rungs.allotment import Candidate
from sandhi_core.rungs.grams import Gram, regmean
from sandhi_core.rungs.residual import spectrum
from sandhi_core.scan import fingerprint

METHODS = ("mean", "regmean")


@dataclass
class Member:
    """One model. `asked`: the different weights that one way has scored, by split; no way finds another's scores."""

    pool: Pool
    entry: ModelEntry
    folder: Path
    asked: dict[Split, set[str]] = field(default_factory=lambda: defaultdict(set))
    ways: int = 0

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint.open(resolve(self.entry), self.entry.name)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.checkpoint, self.folder / "scans")

    @cached_property
    def evaluator(self) -> Evaluator:
        log = ScoreLog(self.folder / f"{self.entry.name}-{self.ways}.jsonl")
        place, cache = self.checkpoint.directory, self.folder / "cache"
        return Evaluator(place, self.fingerprint, self.entry, self.pool.evaluation, log, cache)

    @cached_property
    def grams(self) -> dict[str, Gram]:
        """Of the model's own prompts: the profile split."""
        held = Resident(self.checkpoint.directory, self.entry.name, self.pool.evaluation)
        return input_grams(held, self.evaluator.suite, "profile", self.fingerprint.slots)

    def anew(self) -> None:
        """Begin another way: with nothing scored, and the model not loaded."""
        self.asked.clear()
        self.ways += 1
        self.__dict__.pop("evaluator", None)

    @property
    def budgets(self) -> dict[str, float]:
        return {task.task: task.budget for task in self.entry.tasks}

    def slot(self, tensor: str) -> Slot:
        return next(slot for slot in self.fingerprint.slots if slot.tensor == tensor)

    def evaluate(self, split: Split, tensors: Mapping[str, tuple[str, Tensor]]) -> Evaluation:
        """Score the model with these tensors (name to what names the bytes, and the bytes) in place of its own."""
        names = {name: identity for name, (identity, _) in tensors.items()}
        key = weights_key(self.fingerprint.digest, names)
        self.asked[split].add(key)
        return self.evaluator.evaluate(split, Weights(key, names, lambda name: tensors[name][1]))

    def drops(self, split: Split, tensors: Mapping[str, tuple[str, Tensor]]) -> Scores:
        """Of every task, in its metric's unit; negative is better."""
        before, after = self.evaluate(split, {}), self.evaluate(split, tensors)
        sign = {task: 1.0 if result.higher_is_better else -1.0 for task, result in before.tasks.items()}
        return {task: sign[task] * (before.scores[task] - after.scores[task]) for task in sign}


@dataclass(frozen=True)
class Members:
    """All of a pool, by name."""

    found: Mapping[str, Member]

    @cached_property
    def sets(self) -> list[tuple[Slot, ...]]:
        """Same-layer slots that agree in their compatibility key, of two models or more, not all equal already."""
        alike: dict[tuple[int, str], list[Slot]] = defaultdict(list)
        for _, member in sorted(self.found.items()):
            for slot in member.fingerprint.slots:
                alike[slot.layer, slot.key].append(slot)
        return [tuple(s) for s in alike.values() if len(s) > 1 and len({slot.digest for slot in s}) > 1]

    def shared(self, method: str) -> dict[tuple[str, str], Tensor]:
        """(model, tensor name) to the tensor that its set shares, as it would be stored."""
        found: dict[tuple[str, str], Tensor] = {}
        for slots in self.sets:
            own = [self.found[slot.model].checkpoint.tensor(slot.tensor) for slot in slots]
            if method == "mean":
                tensor = merge(self._recipe(slots), own, None)
            else:
                grams = [self.found[slot.model].grams[slot.tensor] for slot in slots]
                tensor = regmean(own, grams).to(own[0].dtype)
            found |= {(slot.model, slot.tensor): tensor for slot in slots}
        return found

    def _recipe(self, slots: Sequence[Slot]) -> Recipe:
        info = self.found[slots[0].model].fingerprint.tensor(slots[0].tensor)
        contributors = [Contributor(model=s.model, layer=s.layer, tensor=s.tensor, digest=s.digest) for s in slots]
        return Recipe(
            projection=slots[0].projection, shape=info.shape, dtype=info.dtype, method="mean", rescale="none",
            contributors=tuple(contributors),
        )  # fmt: skip

    def candidates(self, shared: Mapping[tuple[str, str], Tensor]) -> dict[str, dict[str, Candidate]]:
        """By model and tensor name."""
        found: dict[str, dict[str, Candidate]] = {name: {} for name in self.found}
        for (model, name), tensor in shared.items():
            member = self.found[model]
            decomposed = spectrum(member.checkpoint.tensor(name), tensor, member.grams[name])
            found[model][name] = Candidate(decomposed, tuple(tensor.shape), tensor.nbytes)
        return found


def opened(pool: Pool, folder: Path) -> Members:
    """The pool's models; `folder`: an empty one for what is written on the way."""
    for name in ("scans", "cache"):
        (folder / name).mkdir()
    return Members({entry.name: Member(pool, entry, folder) for entry in pool.models})
