"""Notices that a pool file, a task or a checkpoint changed, and starts exactly what the planner calls stale."""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date

import dagster as dg
from dagster._core.storage.tags import RUN_KEY_TAG

from assets.stage import RETRIES, still_deployed
from pipelines.instance import HEADLESS_TAG, UNFINISHED, end_dead_runs, set_slots
from pipelines.jobs import Run, StageJob, nodes_of, runs
from pipelines.reloading import BY_HAND, PATIENCE, RELOADED, outdated, reload_location
from pipelines.settings import Settings
from sandhi_core.catalogue import Planner, load_usable
from sandhi_core.graph import Catalogue, Node

LOCATION = "pipelines.definitions"


def rebuild_sensor(
    catalogue: Catalogue, settings: Settings, jobs: Sequence[StageJob], slots: int | None
) -> dg.SensorDefinition:
    """Requests the planner's frontier; a later tick sees what that made stale, until nothing is. `slots`: how many
    steps may score at a time; None leaves it to the instance (of a cluster, whose devices nobody here knows)."""

    @dg.sensor(
        name="rebuild_stale",
        jobs=jobs,
        minimum_interval_seconds=settings.look_seconds,
        description="Starts what is stale and does not wait for a run under way; tries what failed again the next day.",
    )
    def rebuild_stale(context: dg.SensorEvaluationContext) -> Iterator[dg.RunRequest | dg.SkipReason]:
        current, refused = load_usable(settings.pool_files(), settings.placed)
        notes = [f"left out: {error.problem.line()}" for error in refused]
        notes += [
            f"the groups of {pool} rest: {', '.join(missing)} cannot be read"
            for pool in current.pools
            if (missing := current.unreadable(pool))
        ]
        for note in notes:
            context.log.warning(note)
        if wanted := outdated(catalogue, current, missing=bool(refused)):
            yield _skip(f"pool files changed in what is read once: {_reloaded(context, settings, wanted)}", notes)
            return
        if slots is not None:
            set_slots(context.instance, slots)
        # Longer than the longest pause between two tries of a step, and than a process takes to start.
        silence = 60 + 2**RETRIES * settings.retry_seconds
        for run_id in end_dead_runs(context.instance, settings.artifacts(), silence):
            context.log.warning(f"run {run_id} ended with the process that ran it")
        yield from _requests(context, current, settings, notes)

    return rebuild_stale


def _reloaded(context: dg.SensorEvaluationContext, settings: Settings, wanted: str) -> str:
    """Asks once for what is `wanted`: until the daemon sees the new location, the old one's sensor goes on looking."""
    if settings.webserver is None:
        return f"{BY_HAND}, or let SANDHI_WEBSERVER name the webserver that is to do it"
    asked, _, when = (context.cursor or "").partition(" ")
    if asked == wanted and time.time() < float(when) + PATIENCE:
        return f"{RELOADED}, and is not seen here yet"
    origin = context.code_location_origin
    said = reload_location(settings.webserver, LOCATION if origin is None else origin.location_name)
    if said == RELOADED:
        context.update_cursor(f"{wanted} {time.time():.0f}")
    return said


def _skip(reason: str, notes: Sequence[str]) -> dg.SkipReason:
    return dg.SkipReason("; ".join([reason, *notes]))


def _requests(
    context: dg.SensorEvaluationContext, catalogue: Catalogue, settings: Settings, notes: Sequence[str]
) -> Iterator[dg.RunRequest | dg.SkipReason]:
    artifacts = settings.artifacts()
    if artifacts.in_use:
        yield _skip("`sandhi build` is at work in this artifact root", notes)
        return
    planner = Planner(catalogue, artifacts)
    frontier = planner.schedule().frontier
    # A headless build may have been killed, and is cleared up by the next one only.
    unfinished = context.instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))
    busy = set[Node]().union(*(nodes_of(run) for run in unfinished if HEADLESS_TAG not in run.tags))
    failed: list[Run] = []
    requested = 0
    # A checkpoint that is being copied, or on a volume that is away, has not left its group.
    unsettled = {("groups", key) for key in catalogue.keys("group") if catalogue.unreadable(key.partition(".")[0])}
    for run in runs(apart(planner.graph, frontier, busy | unsettled)):
        wanted = frontier[run.stages[0], run.key]
        last = context.instance.get_latest_data_version_record(dg.AssetKey(run.stages[0]), partition_key=run.key)
        key = _run_key(run, wanted, last)
        tried = context.instance.get_runs(dg.RunsFilter(tags={RUN_KEY_TAG: key}), limit=1)
        if tried or (_today(last) and artifacts.failed((run.stages[0], run.key)) == wanted):
            failed.append(run)
            continue
        requested += 1
        yield dg.RunRequest(
            job_name=run.job,
            partition_key=run.key,
            run_key=key,
            asset_selection=[dg.AssetKey(stage) for stage in run.stages],
            tags=run.tags(catalogue),
        )
    if not requested:
        yield _skip(_why_nothing(catalogue, settings, failed, busy), notes)


def apart(graph: Mapping[Node, Sequence[Node]], frontier: Mapping[Node, str], busy: set[Node]) -> list[Node]:
    """Of the frontier what neither is under way nor depends on anything that is: that may still change."""
    unknown = set(busy)
    for node, upstream in graph.items():
        if not unknown.isdisjoint(upstream):
            unknown.add(node)
    return [node for node in frontier if node not in unknown]


def _run_key(run: Run, wanted: str, last: dg.EventLogRecord | None) -> str:
    """A run key is used once for ever. The last materialisation is part of it, because weights that go from A to B and
    back to A must be rebuilt; and the day, so that what failed is tried again."""
    after = str(last.storage_id if last else 0)
    return ":".join([run.stages[0], run.key, wanted, after, str(date.today())])


def _today(last: dg.EventLogRecord | None) -> bool:
    """Whether the last materialisation, which a proof that fails is too, was made today."""
    return last is not None and date.fromtimestamp(last.timestamp) == date.today()


def _why_nothing(catalogue: Catalogue, settings: Settings, failed: Sequence[Run], busy: set[Node]) -> str:
    said = []
    if busy:
        said.append("a run is under way, and what else is stale depends on it")
    if failed:
        names = ", ".join(f"{run.stages[0]} of {run.key}" for run in failed)
        nodes = [(run.stages[0], run.key) for run in failed]
        kept = "; ".join(dict.fromkeys(still_deployed(catalogue, settings.artifacts(), node) for node in nodes))
        said.append(f"{names} failed, to be tried again tomorrow or when anything it is made from changes; {kept}")
    return "; ".join(said) or "nothing is stale"
