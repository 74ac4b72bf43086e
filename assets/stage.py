"""How a stage becomes an asset: partitions, dependencies and checks all come from the catalogue's graph.

A stage's module says what it computes (`run`) and what is worth looking at; everything else is here, once.
"""

import resource
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import dagster as dg
from dagster._core.errors import DagsterExecutionInterruptedError

from assets.telling import Telling
from resources.artifact_root import ArtifactRoot
from resources.devices import SCORING, device_slot
from resources.passing import can_pass
from resources.running import running
from sandhi_core.artifacts import Artifacts
from sandhi_core.catalogue import Planner
from sandhi_core.errors import SandhiError
from sandhi_core.graph import STAGES, Catalogue, Node, Scope, fingerprint
from sandhi_core.records import Record

if TYPE_CHECKING:
    from resources.bench import Bench

FINGERPRINT_TAG = "sandhi/fingerprint"
REGROUP_TAG = "sandhi/regroup"  # on a run: form groups anew, whatever the pool file says of new models
RETRIES = 3  # of what can pass by itself: after 1, 3 and 7 times Running.retry_seconds


Listener = Callable[[str, str, float], None]
"""Called with stage, model and seconds after every fresh evaluation."""


@dataclass(frozen=True)
class Running:
    """How stages run: who hears of evaluations and retries, what devices they score on, how soon a try is repeated."""

    evaluated: Listener = lambda stage, model, seconds: None
    told: Callable[[str], None] = lambda text: None
    devices: tuple[str, ...] = ()
    retry_seconds: int = 30


@dataclass(frozen=True)
class Job:
    """One partition of one stage being materialised."""

    bench: "Bench"
    key: str
    regroup: bool
    log: Callable[[str], None]

    @property
    def pool(self) -> str:
        return self.key.partition(".")[0]


@dataclass(frozen=True)
class Check:
    """The verdict of one asset check; one that is a `warning` stops nothing where it has not passed."""

    name: str
    passed: bool
    description: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    warning: bool = False


Phase = Literal["models", "search", "serving"]
"""The part of the work that a stage belongs to, as the UI groups them."""

ONE_PER: Mapping[Scope, str] = {
    "model": "One partition a model.",
    "group": "One partition for the models of a pool that can share with one another (`pool.group`).",
    "member": "One partition a model of a pool (`pool.model`).",
    "pool": "One partition a pool.",
}


@dataclass(frozen=True)
class Outcome:
    record: Record
    metadata: Mapping[str, Any] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True)
class StageAsset:
    """`scores` stages evaluate models: they take a slot of the concurrency pool SCORING. `checks` says of each check by
    name what it asks.

    The module of its name has `run`, and `after` where something can only be told once the record is saved. It is
    imported when a step runs: torch and lm-eval take seconds, and Dagster loads its graph in every process.
    """

    name: str
    phase: Phase
    description: str
    checks: Mapping[str, str] = field(default_factory=dict)
    scores: bool = False
    kinds: frozenset[str] = frozenset()

    def run(self, job: Job) -> Outcome:
        outcome: Outcome = self._module().run(job)
        return outcome

    def after(self, job: Job) -> Mapping[str, Any]:
        found: Mapping[str, Any] = getattr(self._module(), "after", lambda job: {})(job)
        return found

    def _module(self) -> ModuleType:
        return import_module(f"assets.{self.name}")

    def asset(self, catalogue: Catalogue, how: Running) -> dg.AssetsDefinition:
        partitions = {name: _partitions(catalogue, stage.scope) for name, stage in STAGES.items()}
        mapped = _mappings(catalogue, self.name)

        @dg.asset(
            name=self.name,
            description=f"{self.description}\n\n{ONE_PER[STAGES[self.name].scope]}",
            partitions_def=partitions[self.name],
            code_version=str(STAGES[self.name].version),
            group_name=self.phase,
            kinds=set(self.kinds),
            owners=sorted({owner for pool in catalogue.pools.values() for owner in pool.owners}),
            tags={"sandhi/one-per": STAGES[self.name].scope, "sandhi/scores": "yes" if self.scores else "no"},
            pool=SCORING if self.scores else None,
            deps=[
                dg.AssetDep(name, partition_mapping=dg.StaticPartitionMapping(mapping))
                for name, mapping in mapped.items()
            ],
            check_specs=[self._check_spec(*check, partitions[self.name]) for check in self.checks.items()],
            # A step that fails says itself whether it is worth another try; one that was killed gets it.
            retry_policy=dg.RetryPolicy(RETRIES, how.retry_seconds, dg.Backoff.EXPONENTIAL),
        )
        def materialise(
            context: dg.AssetExecutionContext, artifact_root: ArtifactRoot
        ) -> Iterator[dg.MaterializeResult[Any]]:
            artifacts = artifact_root.artifacts()
            with running(artifacts.directory("running"), context.run.run_id):
                try:
                    with self._placed(catalogue, context.partition_key, artifacts, how) as placed:
                        result = self._materialise(context, catalogue, placed, artifacts, how)
                except Exception as error:
                    raise _failure(error, context, catalogue, artifacts, how) from error
                except (DagsterExecutionInterruptedError, KeyboardInterrupt) as error:
                    # By itself Dagster would try again, half a minute after somebody asked for the end.
                    raise dg.Failure("stopped", allow_retries=False) from error
            yield result

        return materialise

    def _check_spec(self, name: str, asks: str, partitions: dg.StaticPartitionsDefinition) -> dg.AssetCheckSpec:
        with warnings.catch_warnings():
            # Checks by partition are a preview in this (pinned) Dagster; without, one model's verdict hides another's.
            warnings.simplefilter("ignore", dg.PreviewWarning)
            return dg.AssetCheckSpec(name, asset=self.name, description=asks, blocking=True, partitions_def=partitions)

    @contextmanager
    def _placed(self, catalogue: Catalogue, key: str, artifacts: Artifacts, how: Running) -> Iterator[Catalogue]:
        """The catalogue with the device that this step scores on, its own until the end."""
        wanted = catalogue.pools_of((self.name, key))[0].evaluation.device
        with device_slot(artifacts.root / "devices", how.devices if self.scores else (), wanted) as device:
            yield catalogue.on(device)

    def _materialise(
        self,
        context: dg.AssetExecutionContext,
        catalogue: Catalogue,
        placed: Catalogue,
        artifacts: Artifacts,
        how: Running,
    ) -> dg.MaterializeResult[Any]:
        from resources.bench import Bench  # late, as _module is
        from sandhi_core.forecast import bound

        planner = Planner(placed, artifacts)  # a fingerprint says what scored
        node: Node = (self.name, context.partition_key)
        started = time.monotonic()
        telling = Telling(bound(catalogue, artifacts, node) if self.scores else 0, context.log.info)

        def evaluated(model: str, seconds: float) -> None:
            telling.evaluated(model, seconds)
            how.evaluated(self.name, model, seconds)

        regroup = context.run.tags.get(REGROUP_TAG) == "true"
        job = Job(Bench(placed, artifacts, evaluated), context.partition_key, regroup, context.log.info)
        own = planner.own(node)  # before the work: what changes meanwhile must look stale afterwards
        upstream = {u: artifacts.required(u).data_version for u in planner.graph[node]}
        outcome = self.run(job)
        wanted = fingerprint(node, own, upstream)
        version = artifacts.save(node, wanted, own, outcome.record)
        later = self.after(job)
        return dg.MaterializeResult(
            metadata={
                **later,
                **outcome.metadata,
                "seconds": time.monotonic() - started,
                "evaluations": telling.evaluations,
                # Linux counts it in KiB; of the whole process so far, which in a headless build ran other stages too.
                "peak resident bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            },
            data_version=dg.DataVersion(version),
            tags={FINGERPRINT_TAG: wanted[:32]},  # a tag holds 63 characters
            check_results=[_result(check, still_deployed(catalogue, artifacts, node)) for check in outcome.checks],
        )


def still_deployed(catalogue: Catalogue, artifacts: Artifacts, node: Node) -> str:
    """What a failure leaves as it was: the last good deployment of every pool that the node is made for."""
    return "; ".join(_deployed(pool.name, artifacts) for pool in catalogue.pools_of(node))


def _deployed(pool: str, artifacts: Artifacts) -> str:
    if (deployed := artifacts.deployed(pool)) is not None:
        return f"{pool} stays deployed as {deployed}"
    if artifacts.envelope(("deployment", pool)) is not None:
        return f"the files of {pool}'s last deployment are no longer what they were"
    return f"{pool} was never deployed"


def _result(check: Check, deployed: str) -> dg.AssetCheckResult:
    stopped = not check.passed and not check.warning
    return dg.AssetCheckResult(
        check_name=check.name,
        passed=check.passed,
        description=check.description,
        metadata={**check.metadata, **({"deployed": deployed} if stopped else {})},
        severity=dg.AssetCheckSeverity.WARN if check.warning else dg.AssetCheckSeverity.ERROR,
    )


def _failure(
    error: Exception, context: dg.AssetExecutionContext, catalogue: Catalogue, artifacts: Artifacts, how: Running
) -> dg.Failure:
    """The error as Dagster shows it, and tries again only what can pass by itself."""
    what = str(error) if isinstance(error, SandhiError) else f"unexpected {type(error).__name__}: {str(error).strip()}"
    again = can_pass(error)
    if again and context.op_execution_context.retry_number < RETRIES:
        how.told(f"{what}; this can pass by itself and is tried again")
    deployed = still_deployed(catalogue, artifacts, (context.asset_key.to_user_string(), context.partition_key))
    context.log.error(deployed)
    return dg.Failure(what, metadata={"deployed": deployed}, allow_retries=again)


def _partitions(catalogue: Catalogue, scope: Scope) -> dg.StaticPartitionsDefinition:
    return dg.StaticPartitionsDefinition(list(catalogue.keys(scope)))


def _mappings(catalogue: Catalogue, stage: str) -> dict[str, dict[str, list[str]]]:
    """For each upstream stage: upstream key to the keys of `stage` that read it."""
    mapped: dict[str, dict[str, list[str]]] = {}
    for (name, key), upstream in catalogue.graph().items():
        if name == stage:
            for upper, upper_key in upstream:
                mapped.setdefault(upper, {}).setdefault(upper_key, []).append(key)
    return mapped
