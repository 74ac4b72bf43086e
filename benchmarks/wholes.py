"""Ways of sharing that ask no search: nothing, exact duplicates, one merged model for all, a base with adapters."""

import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.outcomes import Outcome, loss
from sandhi_core.assignment import Assignment, factor_names
from sandhi_core.checkpoints.checkpoint import Checkpoint, resolve
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.evaluation.evaluator import Evaluator, merged_weights, score_directory
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.pools.pool import ModelEntry, Pool
from sandhi_core.records import Adjustment, Fingerprint, TaskResult
from sandhi_core.rungs.residual import DTYPE
from sandhi_core.savings import savings
from sandhi_core.store import Store

RANKS = (8, 16)
"""Of the adapters, for every slot alike."""
MERGEKIT = "mergekit==0.1.5"
METHODS: Mapping[str, dict[str, Any]] = {"linear": {"weight": 1.0}, "ties": {"weight": 1.0, "density": 0.5}}
"""mergekit's name of a merge to each model's parameters; both normalise the weights."""


@dataclass
class Member:
    """One model of the pool with its answers to the holdout."""

    entry: ModelEntry
    pool: Pool
    folder: Path
    evaluations: int = 0

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint.open(resolve(self.entry), self.entry.name)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.checkpoint, self.folder / "scans")

    @cached_property
    def evaluator(self) -> Evaluator:
        log = ScoreLog(self.folder / f"{self.entry.name}.jsonl")
        place, cache = self.checkpoint.directory, self.folder / "cache"
        return Evaluator(place, self.fingerprint, self.entry, self.pool.evaluation, log, cache)

    @cached_property
    def before(self) -> dict[str, TaskResult]:
        return self.evaluator.evaluate("holdout", self.evaluator.original).tasks

    def under(self, assignment: Assignment, store: Store) -> dict[str, TaskResult]:
        if not assignment.tensors:
            return self.before
        self.evaluations += 1
        return self.evaluator.evaluate("holdout", merged_weights(self.fingerprint, assignment, store)).tasks

    def replaced_by(self, directory: Path) -> dict[str, TaskResult]:
        self.evaluations += 1
        return score_directory(directory, self.entry, self.pool.evaluation, "holdout", self.folder / "cache")


Bases = Mapping[Path, Sequence[str]]
"""Of which models a checkpoint is the base."""


class Wholes:
    """A pool's models, and below `folder`, an empty one, all that is made of them."""

    def __init__(self, pool: Pool, bases: Bases, folder: Path) -> None:
        for name in ("scans", "cache", "merged"):
            (folder / name).mkdir()
        self.members = {entry.name: Member(entry, pool, folder) for entry in pool.models}
        self.bases = bases
        self.folder = folder
        self.store = Store(folder / "store")

    def rows(self, mergekit: Path | None) -> Iterator[Outcome]:
        """`mergekit`: where its environment is or will be made; None leaves its rows out."""
        yield self._row("no sharing", self._nothing, net=0)
        yield self._row("exact duplicates", self._nothing)
        if not self.bases:
            return
        if mergekit is not None:
            for method in METHODS:
                yield self._whole(method, environment(mergekit))
        for rank in RANKS:
            yield self._row(f"base and adapters of rank {rank}", partial(self._extracted, rank))

    def _nothing(self) -> dict[str, Assignment]:
        return {}

    def _row(self, name: str, make: Callable[[], Mapping[str, Assignment]], net: int | None = None) -> Outcome:
        begun = time.perf_counter()
        assigned = make()
        for member in self.members.values():
            member.evaluations = 0
        after = {n: m.under(assigned.get(n, Assignment()), self.store) for n, m in self.members.items()}
        saved = savings(assigned, {n: m.fingerprint for n, m in self.members.items()})
        return self._outcome(name, saved.net if net is None else net, after, begun)

    def _whole(self, method: str, python: Path) -> Outcome:
        """One model in place of all that have a base in common."""
        begun = time.perf_counter()
        for member in self.members.values():
            member.evaluations = 0
        after, net = {n: m.before for n, m in self.members.items()}, 0
        for base, names in self.bases.items():
            directory = self._merged(method, base, names, python)
            after |= {name: self.members[name].replaced_by(directory) for name in names}
            sizes = [self.members[name].fingerprint.nbytes for name in names]
            net += sum(sizes) - max(sizes)
        return self._outcome(f"one model, mergekit's {method}", net, after, begun)

    def _merged(self, method: str, base: Path, names: Sequence[str], python: Path) -> Path:
        directory = self.folder / "merged" / f"{method}-{base.name}"
        models = [{"model": str(self.members[n].checkpoint.directory), "parameters": METHODS[method]} for n in names]
        recipe = {"merge_method": method, "models": models, "dtype": "float32", "parameters": {"normalize": True}}
        if method == "ties":
            recipe["base_model"] = str(base)
        file = directory.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(recipe))
        command = [str(python.with_name("mergekit-yaml")), str(file), str(directory), "--quiet"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return directory

    def _extracted(self, rank: int) -> dict[str, Assignment]:
        """Every matrix as the base's with the best adapter of that rank (plain SVD, as LoRA extraction does)."""
        found = {}
        for base, names in self.bases.items():
            shared = Checkpoint.open(base, base.name)
            for name in names:
                member = self.members[name]
                tensors, adjustments = {}, {}
                for slot in member.fingerprint.slots:
                    tensors[slot.tensor] = self.store.put(slot.tensor, shared.tensor(slot.tensor))
                    difference = member.checkpoint.tensor(slot.tensor).float() - shared.tensor(slot.tensor).float()
                    adjustments[slot.tensor] = self._adapter(slot.tensor, difference, rank)
                found[name] = Assignment(tensors, adjustments)
        return found

    def _adapter(self, name: str, difference: torch.Tensor, rank: int) -> Adjustment:
        up, values, down = torch.linalg.svd(difference, full_matrices=False)
        even = values[:rank].sqrt()
        factors = (even[:, None] * down[:rank]).to(DTYPE), (up[:, :rank] * even).to(DTYPE)
        digests = [self.store.put(n, f.contiguous()) for n, f in zip(factor_names(name), factors, strict=True)]
        nbytes = sum(factor.nbytes for factor in factors)
        return Adjustment(kind="low_rank", nbytes=nbytes, rank=rank, down=digests[0], up=digests[1])

    def _outcome(self, name: str, net: int, after: Mapping[str, Mapping[str, TaskResult]], begun: float) -> Outcome:
        return Outcome(
            name,
            net,
            sum(m.fingerprint.nbytes for m in self.members.values()),
            {n: loss(m.entry, m.before, after[n]) for n, m in self.members.items()},
            sum(m.evaluations for m in self.members.values()),
            time.perf_counter() - begun,
        )


def environment(folder: Path) -> Path:
    """The Python of an environment with mergekit in it, made where there is none.

    Raises RuntimeError where it cannot be installed.
    """
    python = folder / "bin" / "python"
    if not (folder / "bin" / "mergekit-yaml").exists():
        venv.create(folder, with_pip=True)
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            MERGEKIT,
            f"torch=={torch.__version__.split('+')[0]}",
        ]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise RuntimeError(f"pip cannot install {MERGEKIT}; leave its rows out with --no-mergekit")
    return python
