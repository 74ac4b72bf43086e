"""The fixture pool built by a Ray cluster, a worker of which is killed in the middle: the same bytes as on one machine.

    python -m benchmarks.cluster [--fixture .sandhi-demo/fixture] [--workers 2] [--out benchmarks/cluster]

Everything is the real thing on one machine: a Ray head that runs nothing and workers of one CPU each, the instance of
docs/scale/ray.yaml (with SQLite in place of Postgres, which one machine allows), the Dagster daemon, the sensor
`rebuild_stale` switched on, and nothing else told. The first worker that runs a trajectory is killed with SIGKILL,
all of its processes at once, as a machine loses power, as soon as that run has added a score; another is started in
its place. Then every file of records, store and exports is compared with those that `sandhi build` writes in the same
folder, but for what holds measurements of memory. Seconds are printed for who waits beside it: on one machine a cluster
only adds to the work.
"""

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import dagster as dg
import yaml

from benchmarks.ways import say
from pipelines.settings import CHECKOUT, Settings
from sandhi_core.catalogue import Planner, load_catalogue
from sandhi_core.layout import DEPLOYMENT

MODELS = {"sorter": "sandhi_sort", "converter": "sandhi_units", "inflector": "sandhi_past", "roman": "sandhi_roman"}
LIMIT = 3600.0  # seconds until a build counts as hung
_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]


def write_pool(folder: Path, fixture: Path) -> Path:
    """The pool of the tests: three specialists and an outsider."""
    models = [
        {"name": m, "path": str(fixture / "models" / m), "tasks": [{"task": t, "metric": "acc", "budget": 0.06}]}
        for m, t in MODELS.items()
    ]
    evaluation = {"include_path": str(fixture / "tasks"), "dtype": "float32", "device": "cpu", "threads": 1}
    path = folder / "trained.yaml"
    path.write_text(yaml.safe_dump({"name": "trained", "models": models, "evaluation": evaluation}))
    return path


def digests(root: Path) -> dict[str, str]:
    """Of every file below records, store and exports, by its relative name: scratch files and locks aside, and what
    holds measurements of memory, which no two builds share."""
    found = {}
    for part in ("records", "store", "exports"):
        for path in sorted((root / part).rglob("*")):
            name = path.relative_to(root)
            measured = name.parts[:2] in (("records", "sharing_proof"), ("records", "deployment"))
            if path.is_file() and not path.name.startswith(".") and not measured and path.name != DEPLOYMENT:
                found[str(name)] = sha256(path.read_bytes()).hexdigest()
    return found


def scores(root: Path) -> Counter[str]:
    """How often each evaluation was made: lines of the score logs without the times they took."""
    lines = (line for log in sorted((root / "scores").glob("*.jsonl")) for line in log.read_text().splitlines())
    found = (json.loads(line) for line in lines)
    return Counter(f"{line['weights']} {line['context']}" for line in found)


# --- the cluster ---------------------------------------------------------------------------------------------


def descendants(process: int) -> set[int]:
    """Process ids of everything that a process started, by what it started in turn (proc(5))."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # has ended meanwhile
        children.setdefault(parent, []).append(int(stat.parent.name))
    found: set[int] = set()
    new = {process}
    while new:
        found |= new
        new = {child for parent in new for child in children.get(parent, [])} - found
    return found


@dataclass
class Workers:
    """A local Ray cluster. Its head gives no CPU: runs go to the workers."""

    nodes: list[Any] = field(default_factory=list)
    cluster: Any = None

    def start(self, workers: int) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True,
            shutdown_at_exit=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": 100_000_000,
                "include_dashboard": True,  # the job server is part of it
                "dashboard_host": "127.0.0.1",
            },
        )
        for _ in range(workers):
            self.add()

    @property
    def address(self) -> str:
        return f"http://{self.cluster.webui_url}"

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=1, object_store_memory=100_000_000))

    def processes(self, node: Any) -> set[int]:
        return {pid for kind in node.all_processes.values() for told in kind for pid in descendants(told.process.pid)}

    def kill_that_runs(self, run: str) -> int:
        """SIGKILL to every process of the worker that runs a Dagster run; how many processes that were."""
        for node in self.nodes:
            processes = self.processes(node)
            if any(run in _command(pid) for pid in processes):
                for pid in processes:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self.nodes.remove(node)
                return len(processes)
        raise SystemExit(f"no worker runs {run}")

    def stop(self) -> None:
        """Everything that this process started and that is still there, also of a cluster that did not come up."""
        every = descendants(os.getpid()) - {os.getpid()}
        if self.cluster is not None:
            self.cluster.shutdown()
        for pid in every:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


# --- the build -----------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """Looks at the runs until nothing of the pool is stale, and kills one worker on the way."""

    settings: Settings
    instance: dg.DagsterInstance
    workers: Workers
    killed: str = ""
    processes: int = 0

    def until_built(self) -> None:
        begun, told = time.monotonic(), ""
        planner = Planner(load_catalogue(self.settings.pool_files()), self.settings.artifacts())
        while planner.schedule().frontier or self._unfinished():
            if time.monotonic() - begun > LIMIT:
                raise SystemExit("the cluster has not built the pool within an hour")
            if not self.killed:
                self._kill_a_trajectory()
            counts = Counter(run.status.value for run in self.instance.get_runs())
            now = ", ".join(f"{n} {status.lower()}" for status, n in sorted(counts.items()))
            if now != told:
                say(f"{time.monotonic() - begun:6.0f} s: {now}")
                told = now
            time.sleep(0.5)

    def _unfinished(self) -> bool:
        return any(run.status not in _ENDED for run in self.instance.get_runs())

    def _kill_a_trajectory(self) -> None:
        started = dg.RunsFilter(job_name="build_trajectory", statuses=[dg.DagsterRunStatus.STARTED])
        for run in self.instance.get_runs(started):
            events = self.instance.all_logs(run.run_id)
            if any("evaluation 1 of" in event.user_message for event in events):
                self.processes = self.workers.kill_that_runs(run.run_id)
                self.killed = run.run_id
                say(f"killed the worker of {run.tags['dagster/partition']}: {self.processes} processes")
                self.workers.add()
                return


@contextmanager
def daemon(environment: dict[str, str], work: Path) -> Iterator[None]:
    """The code location as a server of its own (docs/scale.md; nothing here has it loaded anew), and the Dagster daemon
    with its sensor switched on; all of it is ended at the end."""
    port = free_port()
    where = ["--workspace", str(work / "workspace.yaml")]
    server = {"host": "127.0.0.1", "port": port, "location_name": "pipelines.definitions"}
    (work / "workspace.yaml").write_text(yaml.safe_dump({"load_from": [{"grpc_server": server}]}))
    code = ["--module-name", "pipelines.definitions", "--working-directory", str(CHECKOUT)]
    serve = ["dagster", "api", "grpc", *code, "--host", "127.0.0.1", "--port", str(port)]
    with ExitStack() as stack:
        stack.enter_context(_running(serve, environment, work / "code.log"))
        _wait_for(port)
        on = [sys.executable, "-W", "ignore", "-m", "dagster", "sensor", "start", "rebuild_stale", *where]
        subprocess.run(on, cwd=CHECKOUT, env=environment, check=True, capture_output=True, timeout=300)
        stack.enter_context(_running(["dagster._daemon", "run", *where], environment, work / "daemon.log"))
        yield


@contextmanager
def _running(module: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """A Python module as a process of its own, ended at the end whatever it does."""
    with log.open("wb") as out:
        running = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", *module],
            cwd=CHECKOUT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield
        finally:
            running.send_signal(signal.SIGINT)
            try:
                running.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()


def _wait_for(port: int) -> None:
    """Until something listens: a code server does when it has loaded everything."""
    until = time.monotonic() + 600
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return
        if time.monotonic() > until:
            raise SystemExit("the code server does not listen after ten minutes")
        time.sleep(0.5)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def instance_file(home: Path, limit: int) -> None:
    """docs/scale/ray.yaml for one machine: SQLite, and as many at once as there are workers."""
    settings = yaml.safe_load((CHECKOUT / "docs" / "scale" / "ray.yaml").read_text())
    del settings["storage"]
    settings["concurrency"]["pools"]["default_limit"] = limit
    settings["concurrency"]["runs"]["max_concurrent_runs"] = limit
    settings["run_monitoring"]["poll_interval_seconds"] = 5
    home.mkdir(parents=True)
    (home / "dagster.yaml").write_text(yaml.safe_dump(settings))


def build_here(pool: Path, root: Path) -> float:
    begun = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", "sandhi_core", "build", str(pool), "--root", str(root)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SANDHI_", "DAGSTER_"))}
    subprocess.run(command, cwd=CHECKOUT, env=environment, check=True, timeout=LIMIT, stdout=subprocess.DEVNULL)
    return time.monotonic() - begun


def build_there(pool: Path, root: Path, workers: int, work: Path) -> tuple[float, Watch, list[dg.DagsterRun]]:
    home = work / "instance"
    instance_file(home, workers)
    with ExitStack() as stack:
        cluster = Workers()
        stack.callback(cluster.stop)
        # Workers find `dagster` where this Python is.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        cluster.start(workers)
        os.environ |= {
            "DAGSTER_HOME": str(home),
            "SANDHI_POOLS": str(pool),
            "SANDHI_HOME": str(root),
            "SANDHI_CLUSTER": "ray",
            "SANDHI_SCORING": '{"num_cpus": 1}',  # a worker here is a CPU
            "SANDHI_RAY_ADDRESS": cluster.address,
        }
        say(f"a head and {workers} workers at {cluster.address}")
        begun = time.monotonic()
        stack.enter_context(daemon(dict(os.environ), work))
        instance = stack.enter_context(dg.DagsterInstance.get())
        watch = Watch(Settings.from_environment(), instance, cluster)
        watch.until_built()
        return time.monotonic() - begun, watch, list(instance.get_runs())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixture", type=Path, default=Path(".sandhi-demo/fixture"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", type=Path, help="an empty folder to work in, which is kept")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/cluster"))
    given = parser.parse_args()
    with ExitStack() as stack:
        work = given.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sandhi-")))
        work.mkdir(parents=True, exist_ok=True)
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(work.resolve())}
        os.environ |= {"RAY_worker_niceness": "0"}  # by default 15: beside anything else a run would hardly begin
        # Ray listens on the machine's own address: only who knows the token is let in.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        pool, root, cluster = write_pool(work, given.fixture.resolve()), work / "root", work / "cluster"
        there, watch, runs = build_there(pool, root, given.workers, work)
        say(f"a cluster of {given.workers} workers: {there:.0f} s")
        root.rename(cluster)  # both are built in one folder: records name it
        here = build_here(pool, root)
        text, same = told(root, cluster, here, there, watch, runs)
    given.out.with_suffix(".txt").write_text(text)
    print(text, end="")
    sys.exit(0 if same else 1)


def told(
    one: Path, cluster: Path, here: float, there: float, watch: Watch, runs: list[dg.DagsterRun]
) -> tuple[str, bool]:
    """The outcome, file by file where any differs, and whether none does."""
    before, after = digests(one), digests(cluster)
    different = sorted(name for name in before | after if before.get(name) != after.get(name))
    again = [run for run in runs if run.parent_run_id == watch.killed]
    status = Counter(run.status.value.lower() for run in runs)
    made, made_there = scores(one), scores(cluster)
    twice = sum(count - 1 for count in made_there.values())
    rows = [
        ("runs", f"{len(runs)}: " + ", ".join(f"{n} {s}" for s, n in sorted(status.items()))),
        ("killed", f"the worker of {_partition(runs, watch.killed)}, {watch.processes} processes"),
        ("tried again", ", ".join(f"{r.tags['dagster/partition']}: {r.status.value.lower()}" for r in again)),
        ("evaluations", f"{made.total()} on one machine, {made_there.total()} on the cluster, {twice} of them twice"),
        ("files", f"{len(before)} on one machine, {len(after)} on the cluster; measurements of memory left out"),
        ("the same bytes", str(len(before.keys() & after.keys()) - len(different))),
        ("different", ", ".join(different)) if different else ("other bytes", "none"),
        ("seconds", f"{here:.0f} on one machine, {there:.0f} on the cluster (on the same machine)"),
    ]
    return "".join(f"{name:16} {value}\n" for name, value in rows), not different


def _partition(runs: list[dg.DagsterRun], wanted: str) -> str:
    return next(f"{run.job_name} of {run.tags['dagster/partition']}" for run in runs if run.run_id == wanted)


if __name__ == "__main__":
    main()
