"""The one place where everything is put together: assets, jobs, sensor, schedule, resources."""

from collections.abc import Callable

import dagster as dg

from assets.stage import Listener, Running
from assets.stages import STAGE_ASSETS
from pipelines.cluster import Cluster
from pipelines.jobs import jobs
from pipelines.schedules import nightly_rebuild
from pipelines.sensors import rebuild_sensor
from pipelines.settings import Settings
from resources.artifact_root import ArtifactRoot
from sandhi_core.graph import Catalogue


def build_definitions(
    catalogue: Catalogue,
    settings: Settings,
    evaluated: Listener = lambda stage, model, seconds: None,
    told: Callable[[str], None] = lambda text: None,
    cluster: Cluster | None = None,
) -> dg.Definitions:
    """Definitions for the pools of `catalogue` in the artifact root of `settings`. `evaluated` and `told` hear of
    every fresh evaluation and of everything that is tried again, of runs in this process; `cluster`: what runs are
    launched on in place of this machine."""
    all_jobs = jobs({} if cluster is None else cluster.scoring)
    how = Running(evaluated, told, settings.devices, settings.retry_seconds)
    slots = settings.slots if cluster is None else None
    return dg.Definitions(
        assets=[stage.asset(catalogue, how) for stage in STAGE_ASSETS.values()],
        jobs=all_jobs,
        sensors=[rebuild_sensor(catalogue, settings, all_jobs, slots)],
        schedules=[nightly_rebuild(catalogue)],
        resources={"artifact_root": ArtifactRoot(path=str(settings.root))},
        executor=None if cluster is None else cluster.executor,
    )
