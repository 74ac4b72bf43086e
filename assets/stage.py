"""How a stage becomes an asset: partitions, dependencies and checks all come from the catalogue's graph.

A stage's module says what it computes (`run`) and what is worth looking at; everything else is here, once.
"""

import resource
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import dagster as dg

from assets.telling import Telling
from resources.artifact_root import ArtifactRoot
from resources.bench import Bench
from sandhi_core.catalogue import Planner
from sandhi_core.errors import SandhiError
from sandhi_core.forecast import bound
from sandhi_core.graph import STAGES, Catalogue, Node, Scope, fingerprint
from sandhi_core.records import Record

FINGERPRINT_TAG = "sandhi/fingerprint"
REGROUP_TAG = "sandhi/regroup"  # on a run: form groups anew, whatever the pool file says of new models


Listener = Callable[[str, str, float], None]
"""Called with stage, model and seconds after every fresh evaluation."""


@dataclass(frozen=True)
class Job:
    """One partition of one stage being materialised."""

    bench: Bench
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

    def result(self) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(
            check_name=self.name,
            passed=self.passed,
            description=self.description,
            metadata=dict(self.metadata),
            severity=dg.AssetCheckSeverity.WARN if self.warning else dg.AssetCheckSeverity.ERROR,
        )


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
    """`scores` stages evaluate models: they take a slot of the `scoring` concurrency pool. `checks` says of each check
    by name what it asks; `after` gives what can only be told once the record is saved."""

    name: str
    phase: Phase
    description: str
    run: Callable[[Job], Outcome]
    checks: Mapping[str, str] = field(default_factory=dict)
    scores: bool = False
    kinds: frozenset[str] = frozenset()
    after: Callable[[Job], Mapping[str, Any]] = lambda job: {}

    def asset(self, catalogue: Catalogue, listener: Listener) -> dg.AssetsDefinition:
        """`listener` is told of every fresh evaluation while it runs in this process."""
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
            pool="scoring" if self.scores else None,
            deps=[
                dg.AssetDep(name, partition_mapping=dg.StaticPartitionMapping(mapping))
                for name, mapping in mapped.items()
            ],
            check_specs=[self._check_spec(*check, partitions[self.name]) for check in self.checks.items()],
        )
        def materialise(
            context: dg.AssetExecutionContext, artifact_root: ArtifactRoot
        ) -> Iterator[dg.MaterializeResult[Any]]:
            yield self._materialise(context, catalogue, artifact_root, listener)

        return materialise

    def _check_spec(self, name: str, asks: str, partitions: dg.StaticPartitionsDefinition) -> dg.AssetCheckSpec:
        with warnings.catch_warnings():
            # Checks by partition are a preview in this (pinned) Dagster; without, one model's verdict hides another's.
            warnings.simplefilter("ignore", dg.PreviewWarning)
            return dg.AssetCheckSpec(name, asset=self.name, description=asks, blocking=True, partitions_def=partitions)

    def _materialise(
        self,
        context: dg.AssetExecutionContext,
        catalogue: Catalogue,
        artifact_root: ArtifactRoot,
        listener: Listener,
    ) -> dg.MaterializeResult[Any]:
        artifacts = artifact_root.artifacts()
        planner = Planner(catalogue, artifacts)
        node: Node = (self.name, context.partition_key)
        started = time.monotonic()
        own = planner.own(node)  # before the work: what changes meanwhile must look stale afterwards
        try:
            telling = Telling(bound(catalogue, artifacts, node) if self.scores else 0, context.log.info)

            def evaluated(model: str, seconds: float) -> None:
                telling.evaluated(model, seconds)
                listener(self.name, model, seconds)

            regroup = context.run.tags.get(REGROUP_TAG) == "true"
            job = Job(Bench(catalogue, artifacts, evaluated), context.partition_key, regroup, context.log.info)
            upstream = {u: artifacts.required(u).data_version for u in planner.graph[node]}
            outcome = self.run(job)
            wanted = fingerprint(node, own, upstream)
            version = artifacts.save(node, wanted, own, outcome.record)
            later = self.after(job)
        except SandhiError as error:
            raise dg.Failure(description=str(error), allow_retries=False) from error
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
            check_results=[check.result() for check in outcome.checks],
        )


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
