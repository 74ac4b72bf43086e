"""What the stages work with: opened checkpoints, the evaluator of a model, the store of shared tensors."""

from collections.abc import Callable
from functools import cache, partial
from typing import TypeVar

from sandhi_core.artifacts import Artifacts
from sandhi_core.assignment import Assignment, parts_of
from sandhi_core.checkpoints.checkpoint import Checkpoint, resolve
from sandhi_core.errors import CheckpointError, MergeError, PreflightError, StoreError
from sandhi_core.evaluation.evaluator import Evaluator
from sandhi_core.evaluation.inputs import Inputs
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.graph import Catalogue
from sandhi_core.holdout import deployed_holdouts
from sandhi_core.offers import ALL, Offers
from sandhi_core.pools.pool import Base, ModelEntry, Pool
from sandhi_core.preflight.checks import check_base
from sandhi_core.recipes import SharedTensors
from sandhi_core.records import Contributor, Fingerprint, HoldoutScore, OperatingPoints, Plan, Record
from sandhi_core.rungs.allotment import Bid
from sandhi_core.rungs.grams import Gram
from sandhi_core.store import Store

R = TypeVar("R", bound=Record)


class Bench:
    """Opens things of one catalogue in one artifact root. `evaluated` is called after every fresh evaluation."""

    def __init__(self, catalogue: Catalogue, artifacts: Artifacts, evaluated: Callable[[str, float], None]) -> None:
        self.catalogue = catalogue
        self.artifacts = artifacts
        self.store = Store(artifacts.directory("store"))
        self.scans = artifacts.directory("scans")
        self.datasets = artifacts.directory("datasets")
        self._evaluated = evaluated
        self._inputs: dict[str, Inputs] = {}
        self._bases: dict[Base, tuple[Checkpoint, Fingerprint]] = {}

    def fingerprint(self, model: str) -> Fingerprint:
        return self.artifacts.load(Fingerprint, "checkpoint", model)

    def checkpoint(self, model: str) -> Checkpoint:
        """Open a checkpoint, holding it to the files that its `checkpoint` stage saw.

        Raises CheckpointError where they have changed since.
        """
        if model not in self.catalogue.group_of:
            raise CheckpointError(
                "a recipe that was kept needs this model's weights, and no pool file names it any more",
                model=model,
                remedy="name the model in the pool again, or set grouping.on_removed_model: reform",
            )
        _, entry = self.catalogue.entry(model)
        opened = Checkpoint.open(resolve(entry), model)
        envelope = self.artifacts.envelope(("checkpoint", model))
        if envelope is None or envelope.own["files"] != opened.identity():
            raise CheckpointError(
                "the files are not those that were fingerprinted",
                model=model,
                file=str(opened.directory),
                remedy="build again, so that the checkpoint stage sees them",
            )
        return opened

    def evaluator(self, pool: Pool, entry: ModelEntry) -> Evaluator:
        """The evaluator of one model; it loads weights only when a score is not in the log."""
        return Evaluator(
            self.checkpoint(entry.name).directory,
            self.fingerprint(entry.name),
            entry,
            pool.evaluation,
            ScoreLog(self.artifacts.directory("scores") / f"{entry.name}.jsonl"),
            self.datasets,
            lambda seconds: self._evaluated(entry.name, seconds),
            lambda: self.checkpoint(entry.name),
        )

    def base(self, base: Base) -> tuple[Checkpoint, Fingerprint]:
        """Open a base and fingerprint it. Raises PreflightError with all that is wrong with it."""
        if base not in self._bases:
            problems, fingerprint = check_base(base, self.scans)
            if fingerprint is None:
                raise PreflightError(problems)
            self._bases[base] = Checkpoint.open(resolve(base), base.name), fingerprint
        return self._bases[base]

    def opened(self, pool: Pool, name: str) -> tuple[Checkpoint, Fingerprint]:
        """A model, or a base of the pool, by its name."""
        base = next((base for base in pool.bases if base.name == name), None)
        return (self.checkpoint(name), self.fingerprint(name)) if base is None else self.base(base)

    def inputs(self, model: str, evaluator: Evaluator | None = None) -> Inputs:
        """The moments of a model's inputs; where they must be collected, `evaluator` (or one of their own) answers."""
        if model not in self._inputs:
            used = evaluator or self.evaluator(*self.catalogue.entry(model))
            self._inputs[model] = Inputs(self.artifacts.directory("inputs"), self.fingerprint(model), used)
        return self._inputs[model]

    def shared_tensors(self, pool: Pool) -> SharedTensors:
        return SharedTensors(self.store, self.scans, cache(partial(self.opened, pool)), self._gram)

    def _gram(self, contributor: Contributor) -> Gram:
        inputs = self.inputs(contributor.model)
        if inputs.key != contributor.inputs:
            raise MergeError(
                "the moments of its inputs are not those that were grouped by: its questions changed since",
                model=contributor.model,
                tensor=contributor.tensor,
                remedy="build again, so that the groups stage sees the new questions",
            )
        inputs.ready()
        return inputs.gram(contributor.tensor)

    def offers(self, pool: Pool, entry: ModelEntry, evaluator: Evaluator | None = None) -> Offers:
        """What the plan of one model of a pool offers it; `evaluator`: see inputs."""
        adapters = pool.deploy.adapters
        largest = ALL if adapters is None else adapters.max_rank
        return Offers(
            self.artifacts.directory("spectra"),
            self.fingerprint(entry.name),
            self.checkpoint(entry.name),
            self.inputs(entry.name, evaluator),
            self.store,
            self.shared_tensors(pool).digest,
            largest if pool.merging.residuals == "low_rank" else 0,
            pool.merging.affine == "rows",
            pool.search.errors == "answers",
        )

    def restore(self, key: str, assignment: Assignment) -> None:
        """Make the tensors of an assignment of the member `key` again that the store has lost.

        Raises StoreError where a tensor or a residual comes out otherwise: then it is not what was scored.
        """
        lost = {
            n: a for n, a in assignment.adjustments.items() if not all(map(self.store.has, parts_of(n, a).values()))
        }
        gone = {name for name, digest in assignment.tensors.items() if not self.store.has(digest)} | lost.keys()
        if not gone:
            return
        pool, entry = self.catalogue.entry(key)
        plan = self.artifacts.load(Plan, "plan", key)
        merges, shared = [m for step in plan.steps for m in step.merges if m.tensor in gone], self.shared_tensors(pool)
        shared.prepare(merge.recipe for merge in merges)
        for merge in merges:
            shared.digest(merge.recipe)
            if not self.store.has(assignment.tensors[merge.tensor]):
                raise _other("shared tensor", key, merge.tensor)
        offering = self.offers(pool, entry, self.evaluator(pool, entry))
        again = offering.assigned(
            offering.of(plan, lost), {n: Bid(a.rank, a.kind == "affine") for n, a in lost.items()}
        )
        if changed := [name for name, found in again.adjustments.items() if found != lost[name]]:
            raise _other("residual", key, changed[0])

    def of_pool(self, kind: type[R], stage: str, pool: str) -> dict[str, R]:
        """A member stage's records of every model of a pool."""
        members = self.catalogue.members(pool)
        return {m: self.artifacts.load(kind, stage, f"{pool}.{m}") for m in members}

    def deployed_holdouts(self, pool: str) -> dict[str, HoldoutScore]:
        """What the holdout measured at the deployed point of a pool, by model name (holdout.deployed_holdouts)."""
        points = self.artifacts.load(OperatingPoints, "operating_points", pool)
        return deployed_holdouts(points, self.of_pool(HoldoutScore, "holdout", pool))

    def checkpoints(self, pool: str) -> dict[str, Checkpoint]:
        return {m: self.checkpoint(m) for m in self.catalogue.members(pool)}

    def fingerprints(self, pool: str) -> dict[str, Fingerprint]:
        return {m: self.fingerprint(m) for m in self.catalogue.members(pool)}


def _other(what: str, key: str, tensor: str) -> StoreError:
    return StoreError(
        f"the {what} that was scored is lost, and what is made in its place differs",
        model=key.rpartition(".")[2],
        tensor=tensor,
        remedy=f"remove records/trajectory/{key}.json and build again: it searches anew",
    )
