"""The same jobs as in the UI, run in this process until nothing of the given pools is stale."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import dagster as dg

from assets.stage import REGROUP_TAG, still_deployed
from pipelines.assembly import build_definitions
from pipelines.instance import HEADLESS_TAG, clear_dead_runs, opened_instance
from pipelines.jobs import Run, runs
from pipelines.progress import Progress
from pipelines.settings import Settings
from sandhi_core.artifacts import Artifacts
from sandhi_core.catalogue import Planner
from sandhi_core.errors import SandhiError
from sandhi_core.graph import Catalogue, Node


class BuildError(SandhiError):
    """A stage failed; the message is that stage's own."""

    code = "build"


@dataclass
class Built:
    ran: list[Node] = field(default_factory=list)
    evaluations: Counter[str] = field(default_factory=Counter)


def build(catalogue: Catalogue, settings: Settings, progress: Progress, *, regroup: bool = False) -> Built:
    """Run what is stale, wave by wave. Raises BuildError at the first stage that fails.

    To be called while holding the artifact root's lock. `regroup` forms the groups anew, whatever they were.
    """
    artifacts = settings.artifacts()
    built = Built()
    own = replace(settings, devices=())  # one process needs no slots: it scores where the catalogue says
    definitions = build_definitions(catalogue, own, progress.evaluated, progress.told)
    with opened_instance(settings.root) as instance:
        clear_dead_runs(instance)
        forced = catalogue.regrouped(regroup)
        while (schedule := Planner(catalogue, artifacts).schedule(forced)).frontier:
            progress.keep({*schedule.frontier, *schedule.waiting})
            for run in runs(schedule.frontier):
                with progress.running(run):
                    built.evaluations.update(_execute(definitions, instance, run, catalogue, artifacts, regroup))
                built.ran += [(stage, run.key) for stage in run.stages]
            forced -= schedule.frontier.keys()
    return built


def _execute(
    definitions: dg.Definitions,
    instance: dg.DagsterInstance,
    run: Run,
    catalogue: Catalogue,
    artifacts: Artifacts,
    regroup: bool,
) -> Counter[str]:
    """Run one job for one partition; returns the evaluations it made, by model."""
    job = definitions.resolve_job_def(run.job)
    result = job.execute_in_process(
        instance=instance,
        partition_key=run.key,
        asset_selection=[dg.AssetKey(stage) for stage in run.stages],
        tags={HEADLESS_TAG: "true", REGROUP_TAG: str(regroup).lower(), **run.tags(catalogue)},
        run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
        raise_on_error=False,
    )
    if not result.success:
        about = f"{run.stages[0]} of {run.key} failed: {_reason(result)}"
        deployed = still_deployed(catalogue, artifacts, (run.stages[0], run.key))
        raise BuildError(about, remedy=f"then build again: what is done is kept; {deployed}")
    made: Counter[str] = Counter()
    for event in result.get_asset_materialization_events():
        metadata = event.materialization.metadata
        made[run.key.rpartition(".")[2]] += int(str(metadata["evaluations"].value))
    return made


def _reason(result: Any) -> str:
    """The message of the stage's failure, without a traceback."""
    checks = result.get_asset_check_evaluations()
    failed = [c for c in checks if not c.passed and c.severity == dg.AssetCheckSeverity.ERROR]
    if failed:
        return "; ".join(f"check {c.check_name}: {c.description}" for c in failed)
    for event in result.get_step_failure_events():
        data = event.step_failure_data
        if data.user_failure_data is not None and data.user_failure_data.description:
            return str(data.user_failure_data.description).removeprefix("error: ")
        error = data.error
        while error is not None and error.cause is not None:
            error = error.cause
        if error is not None:
            return f"unexpected {error.cls_name}: {error.message.strip()}"
    return "the run failed; Dagster's event log says why"
