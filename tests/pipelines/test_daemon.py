"""`make ui` as it is: webserver, daemon, code server and runs are real processes, and nothing but files is edited."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import dagster as dg
import pytest

from assets.stage import REGROUP_TAG
from pipelines.instance import HEADLESS_TAG, opened_instance
from pipelines.jobs import MODEL_TAG, POOL_TAG
from sandhi_core.graph import Node
from tests.conftest import CHECKOUT
from tests.pipelines.conftest import until_it_answers
from tests.pipelines.life import Life, copied, events, since
from tests.pipelines.test_rebuild_table import first, life, nodes, row

__all__ = ["first", "life"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PATIENCE = 900.0  # seconds; a run takes a few on an idle machine
REPOSITORY = {"repositoryName": "__repository__", "repositoryLocationName": "pipelines.definitions"}
START = {
    "startSensor": "mutation ($s: SensorSelector!) { startSensor(sensorSelector: $s) { __typename } }",
    "startSchedule": "mutation ($s: ScheduleSelector!) { startSchedule(scheduleSelector: $s) { __typename } }",
}


@dataclass(frozen=True)
class Served:
    life: Life
    root: Path
    address: str

    def switch_on(self, what: str, name: dict[str, str], gives: str) -> None:
        asked = json.dumps({"query": START[what], "variables": {"s": REPOSITORY | name}}).encode()
        request = Request(f"{self.address}/graphql", asked, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as reply:
            assert json.load(reply)["data"][what]["__typename"] == gives

    def ran(self, before: dict[int, Any]) -> set[Node]:
        return set(since(before, self.root).ran)

    def runs(self, **tags: str) -> list[dg.DagsterRun]:
        """Runs that the daemon started, the first first."""
        with opened_instance(self.root) as instance:
            found = instance.get_runs(dg.RunsFilter(tags=tags), ascending=True)
            return [run for run in found if HEADLESS_TAG not in run.tags]


def waited(what: str, until: Callable[[], Any]) -> Any:
    """What `until` gives as soon as that is something."""
    end = time.monotonic() + PATIENCE
    while not (found := until()):
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def served(life: Life, first: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Sensor and schedule on, looking every second, on a copy of both pools as built."""
    root = copied(first, tmp_path_factory.mktemp("served"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "DAGSTER_HOME"},
        **{"SANDHI_HOME": str(root), "SANDHI_POOLS": str(life.folder / "pools")},
        **{"SANDHI_LOOK_SECONDS": "1", "OMP_NUM_THREADS": "1"},
    }
    with ui(environment, port) as address, life.edited():
        found = Served(life, root, address)
        found.switch_on("startSensor", {"sensorName": "rebuild_stale"}, "Sensor")
        found.switch_on("startSchedule", {"scheduleName": "nightly_rebuild"}, "ScheduleStateResult")
        yield found
    waited("the end of all", lambda: not processes(root))


@contextmanager
def ui(environment: dict[str, str], port: int) -> Iterator[str]:
    """The UI, once it serves, and until it has ended with all that it started."""
    command = [sys.executable, "-m", "pipelines.ui", "--port", str(port)]
    log = Path(environment["SANDHI_HOME"]).parent / "ui.log"
    with (
        log.open("w") as out,
        subprocess.Popen(
            command, cwd=CHECKOUT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            said = ("Serving dagster-webserver", "configured with the following daemons")
            waited("the UI", lambda: process.poll() is not None or all(text in log.read_text() for text in said))
            assert process.poll() is None, log.read_text()
            until_it_answers(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(120)
            for left in processes(Path(environment["SANDHI_HOME"])):
                with suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
            process.kill()


def processes(root: Path) -> list[int]:
    """Processes, this one aside, whose artifact root that is."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"SANDHI_HOME={root}\0".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def test_an_edit_runs_what_the_table_says_and_no_more(served: Served) -> None:
    before = events(served.root)
    edit = "`deploy.device_memory` of q"
    served.life.write("q", deploy={"device_memory": "40GiB"})
    waited("the deployment", lambda: nodes(row(edit).runs) <= served.ran(before))
    (run,) = served.runs(**{POOL_TAG: "q"})
    waited("its end", lambda: served.runs(**{POOL_TAG: "q"})[0].is_finished)
    assert served.ran(before) == nodes(row(edit).runs) and MODEL_TAG not in run.tags


def test_a_time_to_rebuild_is_read_without_anybody_reloading_and_regroups(served: Served) -> None:
    """The sensor has the webserver reload the code location; the schedule then ticks at the next minute."""
    before = events(served.root)
    served.life.write("q", deploy={"device_memory": "40GiB"}, rebuild="* * * * *")
    found = waited("a scheduled run", lambda: served.runs(**{REGROUP_TAG: "true", POOL_TAG: "q"}))
    served.life.write("q", deploy={"device_memory": "40GiB"})
    waited("its end", lambda: served.runs(**{REGROUP_TAG: "true"})[0].is_finished)
    assert found[0].job_name == "build_groups" and found[0].tags["dagster/schedule_name"] == "nightly_rebuild"
    # The groups come out as they were, and that is all, beside what the edit before asked for where it is not done yet.
    assert served.ran(before) - nodes("deployment: q") == nodes("groups: q.narrow")


def test_a_killed_run_gives_its_slot_to_the_next_and_is_run_again(served: Served) -> None:
    """Two profiles and one slot: of the first every process is killed in the middle of its step."""
    before = events(served.root)
    served.life.write("q", deploy={"device_memory": "40GiB"}, profile={"seeds": list(range(100))})
    locks = served.root / "running"
    step = waited("a step", lambda: [(p.stem, int(t)) for p in locks.glob("*.lock") if (t := content(p)).strip()])
    ((killed, pid),) = step
    waited("the second to queue", lambda: len(profiles(served)) == 2)
    first_run, second = profiles(served)
    assert first_run.run_id == killed and second.status == dg.DagsterRunStatus.QUEUED  # one slot
    for process in (parent(pid), pid):
        os.kill(process, signal.SIGKILL)
    waited("the slot", lambda: content(locks / f"{second.run_id}.lock") or profiles(served)[1].is_finished)
    assert profiles(served)[0].status == dg.DagsterRunStatus.FAILURE
    waited("both", lambda: nodes("profile: d, e") <= served.ran(before))
    again = [run for run in profiles(served) if run.tags.get("dagster/parent_run_id") == killed]
    assert len(again) == 1 and again[0].tags[MODEL_TAG] == first_run.tags[MODEL_TAG]


def profiles(served: Served) -> list[dg.DagsterRun]:
    return [run for run in served.runs(**{POOL_TAG: "q"}) if run.job_name == "build_profile"]


def content(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
