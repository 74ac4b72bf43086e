"""The Dagster instance of an artifact root, and what a killed run leaves behind in it."""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from dagster import DagsterInvalidConfigError
from dagster._core.instance.ref import InstanceRef
from sqlalchemy.exc import SQLAlchemyError
from yaml import YAMLError

from resources.devices import SCORING
from resources.running import is_running
from sandhi_core.artifacts import Artifacts
from sandhi_core.errors import StoreError
from sandhi_core.files import write_atomic, writing

HEADLESS_TAG = "sandhi/headless"

_SETTINGS = """\
telemetry:
  enabled: false
nux:
  enabled: false
concurrency:
  pools:
    default_limit: 1
    granularity: run
run_retries:
  enabled: true
  max_retries: 2
  retry_on_asset_or_op_failure: false
run_monitoring:
  enabled: true
  free_slots_after_run_end_seconds: 60
code_servers:
  local_startup_timeout: 600
"""
# `local_startup_timeout`: loading imports torch, which takes minutes where a machine is busy.
# `granularity: run`: a run that waits for a slot is queued, and no process waits for it. `run_retries`: of runs whose
# process was killed; what fails in a stage is tried again there, or not at all (assets/stage.py).

_FORMER_SETTINGS = """\
telemetry:
  enabled: false
concurrency:
  pools:
    default_limit: 1
run_monitoring:
  enabled: true
  free_slots_after_run_end_seconds: 60
"""

UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]

# A log file of each step's output serves whoever looks from elsewhere. Here that is the terminal already, and the
# processes that follow those files would be hit by Ctrl-C and say so.
_HEADLESS: Mapping[str, Any] = {
    "compute_logs": {"module": "dagster._core.storage.noop_compute_log_manager", "class": "NoOpComputeLogManager"}
}


def dagster_home(root: Path) -> Path:
    """DAGSTER_HOME, or `dagster/` in the artifact root, with settings written once; those that an earlier version wrote
    are replaced, those that a person changed are not."""
    home = Path(os.environ.get("DAGSTER_HOME", root / "dagster")).resolve()
    settings = home / "dagster.yaml"
    with writing(home):
        home.mkdir(parents=True, exist_ok=True)
        if not settings.exists() or settings.read_bytes() == _FORMER_SETTINGS.encode():
            write_atomic(settings, _SETTINGS.encode())
    os.environ["DAGSTER_HOME"] = str(home)
    return home


@contextmanager
def opened_instance(root: Path) -> Iterator[dg.DagsterInstance]:
    """The instance of a root for runs in this process.

    Raises StoreError where its files are damaged or the disk is full.
    """
    home = dagster_home(root)
    # What Ctrl-C cuts short it tells with a traceback and raises all the same.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    try:
        with dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(home), overrides=_HEADLESS)) as instance:
            yield instance
    except (SQLAlchemyError, YAMLError, DagsterInvalidConfigError) as error:
        raise StoreError(
            f"Dagster's own files cannot be used: {str(error).splitlines()[0]}",
            file=str(home),
            remedy="free disk space, or remove this folder: it holds the history of runs, no result",
        ) from error


def clear_dead_runs(instance: dg.DagsterInstance) -> None:
    """End headless runs that were killed and free their concurrency slots, or the next run would wait for ever.

    To be called while holding the artifact root's lock: then no other headless run can be alive.
    """
    unfinished = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.NOT_STARTED]
    dead = instance.get_runs(dg.RunsFilter(tags={HEADLESS_TAG: "true"}, statuses=unfinished))
    for run in dead:
        instance.report_run_canceled(run, "the process that ran it ended")
        instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)


def end_dead_runs(instance: dg.DagsterInstance, artifacts: Artifacts, silence: float) -> list[str]:
    """End runs whose process is gone without anybody's having noticed, because what started it is gone too: all were
    killed at once, or the machine was: of which no step is at work, and nothing was heard for `silence` seconds.
    Returns their ids.

    Where the launcher can tell (Kubernetes' can) this is left to Dagster's monitoring.
    """
    if instance.run_launcher.supports_check_run_worker_health:
        return []
    started = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
    folder = artifacts.root / "running"
    dead = [
        run
        for run in started
        if HEADLESS_TAG not in run.tags and not is_running(folder, run.run_id) and _silent(instance, run, silence)
    ]
    for run in dead:
        instance.report_run_failed(run, "the process that ran it ended")
        instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
    return [run.run_id for run in dead]


def _silent(instance: dg.DagsterInstance, run: dg.DagsterRun, seconds: float) -> bool:
    last = instance.get_records_for_run(run.run_id, limit=1, ascending=False).records
    return bool(last) and time.time() - last[0].timestamp > seconds


def set_slots(instance: dg.DagsterInstance, slots: int) -> None:
    """Let so many runs that score go on at a time."""
    storage = instance.event_log_storage
    limits = {pool.name: pool for pool in storage.get_pool_limits()}
    if SCORING not in limits or limits[SCORING].limit != slots or limits[SCORING].from_default:
        storage.set_concurrency_slots(SCORING, slots)
