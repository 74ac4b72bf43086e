"""Scheduled rebuilds: the groups of a pool formed anew over all its models, whatever joined since."""

from collections.abc import Iterator

import dagster as dg

from assets.stage import REGROUP_TAG
from pipelines.jobs import JOB_OF, runs
from sandhi_core.graph import Catalogue
from sandhi_core.pools.cron import due, plain

NIGHTLY = "0 3 * * *"  # for a schedule that nobody asks anything of: it needs some time


def nightly_rebuild(catalogue: Catalogue) -> dg.ScheduleDefinition:
    """Re-forms every compatibility group of the pools that are due by their `rebuild`; the sensor then runs what that
    changed. One schedule for all pools: it ticks whenever one of them may be due."""
    asked = {name: pool.rebuild for name, pool in catalogue.pools.items() if pool.rebuild is not None}

    @dg.schedule(
        name="nightly_rebuild",
        job_name=JOB_OF["groups"],
        cron_schedule=sorted({plain(cron) for cron in asked.values()}) or NIGHTLY,
        description="Groups formed anew with all current models, of every pool when its `rebuild` says so; the sensor "
        "rebuilds what follows from it.",
    )
    def rebuild(context: dg.ScheduleEvaluationContext) -> Iterator[dg.RunRequest | dg.SkipReason]:
        moment = context.scheduled_execution_time
        pools = {name for name, cron in asked.items() if due(cron, moment)}
        if not pools:
            yield dg.SkipReason("no pool file says `rebuild` for this time")
        for run in runs(node for node in sorted(catalogue.regrouped()) if node[1].partition(".")[0] in pools):
            yield dg.RunRequest(
                run_key=f"{moment:%Y-%m-%dT%H:%M}:{run.key}",
                partition_key=run.key,
                tags={REGROUP_TAG: "true", **run.tags(catalogue)},
            )

    return rebuild
