"""The nightly rebuild: groups formed anew over all models of a pool, whatever joined since."""

from collections.abc import Iterator

import dagster as dg

from assets.stage import REGROUP_TAG
from pipelines.jobs import JOB_OF
from sandhi_core.graph import Catalogue


def nightly_rebuild(catalogue: Catalogue) -> dg.ScheduleDefinition:
    """Re-forms every compatibility group; the sensor then runs what that changed."""

    @dg.schedule(
        name="nightly_rebuild",
        job_name=JOB_OF["groups"],
        cron_schedule="0 3 * * *",
        description="Groups formed anew with all current models; the sensor rebuilds what follows from it.",
    )
    def rebuild(context: dg.ScheduleEvaluationContext) -> Iterator[dg.RunRequest]:
        for key in catalogue.keys("group"):
            yield dg.RunRequest(
                run_key=f"{context.scheduled_execution_time:%Y-%m-%d}:{key}",
                partition_key=key,
                tags={REGROUP_TAG: "true", "sandhi/pool": key.partition(".")[0]},
            )

    return rebuild
