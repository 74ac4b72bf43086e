"""Notices that a pool file, a task or a checkpoint changed, and starts exactly what the planner calls stale."""

from collections.abc import Iterator, Sequence
from datetime import date

import dagster as dg

from pipelines.instance import HEADLESS_TAG
from pipelines.jobs import StageJob, runs
from pipelines.settings import Settings
from sandhi_core.catalogue import Planner, load_catalogue
from sandhi_core.errors import SandhiError
from sandhi_core.graph import STAGES, Catalogue

UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def rebuild_sensor(catalogue: Catalogue, settings: Settings, jobs: Sequence[StageJob]) -> dg.SensorDefinition:
    """Requests the planner's frontier; the next tick sees what that made stale, until nothing is."""

    @dg.sensor(
        name="rebuild_stale",
        jobs=jobs,
        minimum_interval_seconds=30,
        description="Starts what is stale, wave by wave; waits while a run is under way; retries a failure daily.",
    )
    def rebuild_stale(context: dg.SensorEvaluationContext) -> Iterator[dg.RunRequest | dg.SkipReason]:
        try:
            current = load_catalogue(settings.pool_files())
        except SandhiError as error:
            yield dg.SkipReason(str(error))
            return
        if any(current.keys(s.scope) != catalogue.keys(s.scope) for s in STAGES.values()):
            yield dg.SkipReason(
                "pool files name other models or pools than when this code location was loaded: reload it"
            )
            return
        unfinished = context.instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))
        # A headless build may have been killed, and is cleared up by the next one only.
        if any(HEADLESS_TAG not in run.tags for run in unfinished):
            yield dg.SkipReason("a run is under way: what it changes is not known yet")
            return
        frontier = Planner(current, settings.artifacts()).schedule().frontier
        if not frontier:
            yield dg.SkipReason("nothing is stale")
            return
        for run in runs(frontier):
            wanted = frontier[run.stages[0], run.key]
            # A run key is used once for ever. The last materialisation is part of it, because weights that go from A
            # to B and back to A must be rebuilt; and the day, so that what failed is tried again.
            last = context.instance.get_latest_data_version_record(dg.AssetKey(run.stages[0]), partition_key=run.key)
            after = str(last.storage_id if last else 0)
            yield dg.RunRequest(
                job_name=run.job,
                partition_key=run.key,
                run_key=":".join([run.stages[0], run.key, wanted, after, str(date.today())]),
                asset_selection=[dg.AssetKey(stage) for stage in run.stages],
                tags={"sandhi/pool": run.key.partition(".")[0]},
            )

    return rebuild_stale
