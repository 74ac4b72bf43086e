"""What the stages work with: opened checkpoints, the evaluator of a model, the store of shared tensors."""

from collections.abc import Callable
from typing import TypeVar

from sandhi_core.artifacts import Artifacts
from sandhi_core.assignment import Assignment, parts_of
from sandhi_core.checkpoint import Checkpoint, resolve
from sandhi_core.errors import CheckpointError, StoreError
from sandhi_core.evaluation.evaluator import Evaluator
from sandhi_core.evaluation.inputs import Inputs
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.graph import Catalogue
from sandhi_core.holdout import deployed_holdouts
from sandhi_core.pool import ModelEntry, Pool
from sandhi_core.recipes import SharedTensors
from sandhi_core.records import Fingerprint, HoldoutScore, OperatingPoints, Plan, Record
from sandhi_core.rungs.allotment import Bid
from sandhi_core.rungs.offers import ALL, Offers
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
        )

    def shared_tensors(self) -> SharedTensors:
        return SharedTensors(self.store, self.scans, lambda m: (self.checkpoint(m), self.fingerprint(m)))

    def offers(self, pool: Pool, entry: ModelEntry, evaluator: Evaluator) -> Offers:
        """What the plan of one model of a pool offers it."""
        fingerprint, adapters = self.fingerprint(entry.name), pool.deploy.adapters
        largest = ALL if adapters is None else adapters.max_rank
        return Offers(
            self.artifacts.directory("spectra"),
            fingerprint,
            self.checkpoint(entry.name),
            Inputs(self.artifacts.directory("inputs"), fingerprint, evaluator),
            self.store,
            self.shared_tensors().digest,
            largest if pool.merging.residuals == "low_rank" else 0,
            pool.merging.affine == "rows",
            pool.search.errors == "answers",
        )

    def restore(self, key: str, assignment: Assignment) -> None:
        """Make the tensors of an assignment of the member `key` again that the store has lost.

        Raises StoreError where a residual comes out otherwise: then it is not what was scored.
        """
        lost = {
            n: a for n, a in assignment.adjustments.items() if not all(map(self.store.has, parts_of(n, a).values()))
        }
        gone = {name for name, digest in assignment.tensors.items() if not self.store.has(digest)} | lost.keys()
        if not gone:
            return
        pool, entry = self.catalogue.entry(key)
        plan = self.artifacts.load(Plan, "plan", key)
        for merge in (merge for step in plan.steps for merge in step.merges if merge.tensor in gone):
            self.shared_tensors().digest(merge.recipe)
        offering = self.offers(pool, entry, self.evaluator(pool, entry))
        again = offering.assigned(
            offering.of(plan, lost), {n: Bid(a.rank, a.kind == "affine") for n, a in lost.items()}
        )
        if changed := [name for name, found in again.adjustments.items() if found != lost[name]]:
            raise StoreError(
                "the residual that was scored is lost, and what is made in its place differs",
                model=entry.name,
                tensor=changed[0],
                remedy=f"remove records/trajectory/{key}.json and build again: it searches anew",
            )

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
