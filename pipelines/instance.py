"""The Dagster instance of an artifact root, and what a killed run leaves behind in it."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from dagster import DagsterInvalidConfigError
from dagster._core.instance.ref import InstanceRef
from sqlalchemy.exc import SQLAlchemyError
from yaml import YAMLError

from sandhi_core.errors import StoreError
from sandhi_core.files import write_atomic, writing

HEADLESS_TAG = "sandhi/headless"

_SETTINGS = """\
telemetry:
  enabled: false
concurrency:
  pools:
    default_limit: 1
run_monitoring:
  enabled: true
  free_slots_after_run_end_seconds: 60
"""

# A log file of each step's output serves whoever looks from elsewhere. Here that is the terminal already, and the
# processes that follow those files would be hit by Ctrl-C and say so.
_HEADLESS: Mapping[str, Any] = {
    "compute_logs": {"module": "dagster._core.storage.noop_compute_log_manager", "class": "NoOpComputeLogManager"}
}


def dagster_home(root: Path) -> Path:
    """DAGSTER_HOME, or `dagster/` in the artifact root, with settings written once."""
    home = Path(os.environ.get("DAGSTER_HOME", root / "dagster")).resolve()
    with writing(home):
        home.mkdir(parents=True, exist_ok=True)
        if not (home / "dagster.yaml").exists():
            write_atomic(home / "dagster.yaml", _SETTINGS.encode())
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
