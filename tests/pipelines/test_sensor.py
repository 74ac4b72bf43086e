"""The sensor and the schedule, tick by tick: what they ask for, what they leave alone, and what they say."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.tags import PARTITION_NAME_TAG

from assets.stage import REGROUP_TAG
from pipelines.assembly import build_definitions
from pipelines.building import dry_run
from pipelines.checking import check
from pipelines.instance import _FORMER_SETTINGS, dagster_home, end_dead_runs, opened_instance, set_slots
from pipelines.jobs import MODEL_TAG, POOL_TAG, nodes_of, runs
from pipelines.reloading import reload_location
from pipelines.sensors import apart
from pipelines.settings import CLUSTER, Settings
from resources.devices import SCORING
from resources.running import running
from sandhi_core.catalogue import Planner, load_catalogue, load_usable
from sandhi_core.errors import UsageError
from sandhi_core.graph import Node
from tests.pipelines.conftest import Line, PoolWriter
from tests.pipelines.life import copied

STARTED = [dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED]


@dataclass(frozen=True)
class Tick:
    requests: list[dg.RunRequest]
    said: str | None
    cursor: str | None

    @property
    def nodes(self) -> set[Node]:
        return {(key.to_user_string(), r.partition_key or "") for r in self.requests for key in r.asset_selection or []}


@dataclass(frozen=True)
class Watched:
    """A code location as it was loaded, and its instance."""

    settings: Settings
    definitions: dg.Definitions
    instance: dg.DagsterInstance

    def tick(self, cursor: str | None = None) -> Tick:
        sensor = self.definitions.resolve_sensor_def("rebuild_stale")
        context = dg.build_sensor_context(self.instance, cursor, definitions=self.definitions)
        found = sensor.evaluate_tick(context)
        return Tick(list(found.run_requests or []), found.skip_message, found.cursor)

    def started(self, request: dg.RunRequest) -> dg.DagsterRun:
        """A run as the daemon makes one of a request, that nobody executes."""
        job = self.definitions.resolve_job_def(request.job_name or "")
        tags = {
            **request.tags,
            PARTITION_NAME_TAG: request.partition_key or "",
            "dagster/run_key": request.run_key or "",
        }
        chosen = frozenset(request.asset_selection or [])
        return self.instance.create_run_for_job(
            job, tags=tags, status=dg.DagsterRunStatus.STARTED, asset_selection=chosen
        )

    def executed(self, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
        """A run of a request, to its end."""
        return self.definitions.resolve_job_def(request.job_name or "").execute_in_process(
            instance=self.instance,
            partition_key=request.partition_key,
            asset_selection=list(request.asset_selection or []),
            tags={**request.tags, "dagster/run_key": request.run_key or ""},
            run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
            raise_on_error=False,
        )


@contextmanager
def watched(settings: Settings) -> Iterator[Watched]:
    with opened_instance(settings.root) as instance:
        definitions = build_definitions(load_usable(settings.pool_files(), settings.placed).catalogue, settings)
        yield Watched(settings, definitions, instance)


@pytest.fixture
def settings(tiny_pool: PoolWriter, tmp_path: Path) -> Settings:
    return Settings(tiny_pool(["a", "b"]), tmp_path / "root", retry_seconds=0)


def test_runs_are_tagged_by_pool_and_model(settings: Settings) -> None:
    catalogue = load_catalogue(settings.pool_files())
    with watched(settings) as location:
        found = [{t: r.tags.get(t) for t in (POOL_TAG, MODEL_TAG)} for r in location.tick().requests]
        assert found == [{POOL_TAG: "tiny", MODEL_TAG: m} for m in "ab"]
    (grouped,) = runs([("groups", "tiny.h32-bf16")])
    assert grouped.tags(catalogue) == {POOL_TAG: "tiny"}
    (walked,) = runs([("trajectory", "tiny.a")])
    assert walked.tags(catalogue) == {POOL_TAG: "tiny", MODEL_TAG: "a"}
    both = replace(
        catalogue, pools={"other": catalogue.pools["tiny"].model_copy(update={"name": "other"}), **catalogue.pools}
    )
    (read,) = runs([("checkpoint", "a")])
    assert read.tags(both) == {POOL_TAG: "other,tiny", MODEL_TAG: "a"}


def test_a_run_under_way_holds_up_only_what_depends_on_it(settings: Settings) -> None:
    with watched(settings) as location:
        first = location.tick()
        assert first.nodes == {("checkpoint", "a"), ("checkpoint", "b")}
        run = location.started(first.requests[0])
        assert nodes_of(run) == {("checkpoint", "a")}
        assert location.tick().nodes == {("checkpoint", "b")}
        location.started(first.requests[1])
        assert location.tick().said == "a run is under way, and what else is stale depends on it"


def test_what_depends_on_a_run_under_way_waits_however_far_below(settings: Settings) -> None:
    catalogue = load_catalogue(settings.pool_files())
    graph = Planner(catalogue, settings.artifacts()).graph
    frontier = dict.fromkeys(graph, "fingerprint")
    busy = {("trajectory", "tiny.a")}
    left = apart(graph, frontier, busy)
    assert ("trajectory", "tiny.b") in left and ("holdout", "tiny.b") in left and ("plan", "tiny.a") in left
    assert not {("trajectory", "tiny.a"), ("holdout", "tiny.a"), ("deployment", "tiny")} & set(left)


def test_a_failure_is_left_until_tomorrow_and_the_deployment_named(settings: Settings) -> None:
    with watched(settings) as location:
        for request in location.tick().requests:
            location.instance.report_run_failed(location.started(request))
        said = location.tick().said
    assert said is not None and said.startswith("checkpoint of a, checkpoint of b failed, to be tried again tomorrow")
    assert said.endswith("; tiny was never deployed")


@pytest.mark.slow
def test_a_proof_that_failed_is_left_until_tomorrow(
    tiny_line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a materialisation like one that passed, and so another one after every try."""
    settings = Settings(tiny_line.pool, copied(tiny_line.root, tmp_path), retry_seconds=0)
    (specification,) = settings.root.glob("exports/tiny/*/deployment.json")
    specification.unlink()
    damaged = next(specification.parent.glob("a/*.safetensors"))
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    proof = {("sharing_proof", "tiny"), ("deployment", "tiny")}
    with watched(settings) as location:
        first = location.tick()
        assert first.nodes == proof
        assert not location.executed(first.requests[0]).success
        said = location.tick().said
        assert said is not None and said.startswith("sharing_proof of tiny failed, to be tried again tomorrow")
        monkeypatch.setattr("pipelines.sensors.date", Tomorrow)
        assert location.tick().nodes == proof


@pytest.mark.slow
def test_a_model_that_cannot_be_read_for_a_while_has_not_left_its_group(tiny_line: Line, tmp_path: Path) -> None:
    settings = Settings(tiny_line.pool, copied(tiny_line.root, tmp_path), retry_seconds=0)
    directory = tiny_line.pool.parent / "b"
    record = settings.artifacts().required(("groups", "tiny.h32-bf16"))
    with watched(settings) as before:
        directory.rename(tmp_path / "b")
        try:
            with watched(settings) as after:  # whether the code location was loaded before or since
                assert before.tick().nodes == after.tick().nodes == {("checkpoint", "b")}
                nightly = dg.RunRequest(
                    job_name="build_groups", partition_key="tiny.h32-bf16", asset_selection=[dg.AssetKey("groups")]
                )
                assert not after.executed(nightly).success
                (request,) = before.tick().requests
                assert not before.executed(request).success
                said = before.tick().said
        finally:
            (tmp_path / "b").rename(directory)
        assert said is not None and said.startswith("checkpoint of b failed")
        assert said.endswith("; the groups of tiny rest: b cannot be read")
        assert before.tick().said == "nothing is stale"
    assert settings.artifacts().required(("groups", "tiny.h32-bf16")) == record


class Tomorrow(date):
    @classmethod
    def today(cls) -> "Tomorrow":
        found = super().today() + timedelta(days=1)
        return cls(found.year, found.month, found.day)


def test_it_waits_for_a_build_from_the_command_line(settings: Settings) -> None:
    with watched(settings) as location:
        with settings.artifacts().lock():
            assert location.tick().said == "`sandhi build` is at work in this artifact root"
        assert location.tick().requests


def test_the_slots_are_as_many_as_devices(settings: Settings) -> None:
    def limit(instance: dg.DagsterInstance) -> int | None:
        return {p.name: p.limit for p in instance.event_log_storage.get_pool_limits()}.get(SCORING)

    with watched(replace(settings, devices=("cuda:0", "cuda:1", "cuda:2"))) as location:
        location.tick()
        assert limit(location.instance) == 3
        set_slots(location.instance, 1)
        assert limit(location.instance) == 1


def test_what_devices_score_is_fresh_whatever_else_the_machine_has(
    tiny_pool: PoolWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with a GPU whose slots are on the processor: the fingerprint says what scored, for everybody."""
    pool = tiny_pool(["a"], evaluation={"include_path": "tasks", "threads": 1})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("SANDHI_DEVICES", "cpu,cpu")
    settings = Settings(pool, tmp_path / "root", devices=("cpu", "cpu"))
    with watched(settings) as location:
        for stage in ("checkpoint", "profile"):
            (request,) = location.tick().requests
            assert request.job_name == f"build_{stage}" and location.executed(request).success
        scoring = settings.artifacts().required(("profile", "a")).own["scoring"]["conditions"]
        assert (scoring["device"], scoring["dtype"]) == ("cpu", "torch.float32")
        assert location.tick().nodes == {("groups", "tiny.h32-bf16")}
    assert dry_run(pool, settings.root)["stale"] == [["groups", "tiny.h32-bf16"]]


def test_a_cluster_s_pools_say_what_scores_them(
    tiny_pool: PoolWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sensor's machine has no GPU, and what it planned by its own would never be what a worker did."""
    pool = tiny_pool(["a"], evaluation={"include_path": "tasks"})
    settings = Settings(pool, tmp_path / "root", cluster=True)
    with watched(settings) as location:
        said = location.tick().said
        assert said is not None and "evaluation.device of pool tiny is auto" in said and "{device: cuda}" in said
    monkeypatch.setenv(CLUSTER, "kubernetes")
    with pytest.raises(UsageError, match="is auto"):
        check(pool, settings.root)
    tiny_pool(["a"], evaluation={"include_path": "tasks", "device": "cuda"})
    with watched(settings) as location:
        assert location.tick().nodes == {("checkpoint", "a")}
    assert not [p for p in check(pool, settings.root)["problems"] if p["code"] == "device-missing"]


def test_runs_whose_process_is_gone_are_ended(settings: Settings) -> None:
    artifacts = settings.artifacts()
    with watched(settings) as location:
        alive, dead = (location.started(r) for r in location.tick().requests)
        for run in (alive, dead):
            location.instance.report_engine_event("started", run)
        with running(artifacts.root / "running", alive.run_id):
            assert end_dead_runs(location.instance, artifacts, 3600) == []  # it was heard of a moment ago
            assert end_dead_runs(location.instance, artifacts, -1) == [dead.run_id]
        ended = location.instance.get_run_by_id(dead.run_id)
        assert ended is not None and ended.status == dg.DagsterRunStatus.FAILURE
        assert [r.run_id for r in location.instance.get_runs(dg.RunsFilter(statuses=STARTED))] == [alive.run_id]


def test_a_bad_pool_file_holds_up_its_own_pool_alone_and_is_told_of(settings: Settings, tmp_path: Path) -> None:
    """Whether it was bad when the code location was loaded, or became so."""
    folder = tmp_path / "pools"
    folder.mkdir()
    text = settings.pools.read_text().replace(" path: ", f" path: {tmp_path}/").replace("path: tasks", "path: /tasks")
    for name in ("good", "other"):
        (folder / f"{name}.yaml").write_text(text.replace("name: tiny", f"name: {name}"))
    (folder / ".pre-commit-config.yaml").write_text("repos: []\n")
    (folder / "bad.yaml").write_text("name: bad\nmodels: []\n")
    told = f"left out: error: pool: file {folder}/bad.yaml:2: "
    with watched(replace(settings, pools=folder)) as location:
        assert location.tick().nodes == {("checkpoint", "a"), ("checkpoint", "b")}
        (folder / "other.yaml").write_text("name: other\nmodels: []\n")
        first = location.tick()
        assert {request.tags[POOL_TAG] for request in first.requests} == {"good"}
        for request in first.requests:
            location.started(request)
        said = location.tick().said
        assert said is not None and said.startswith("a run is under way") and told in said and "other.yaml:2" in said
        (folder / "bad.yaml").unlink()
        (folder / "other.yaml").unlink()
        told_at_last = location.tick().said
        assert told_at_last is not None and told_at_last.startswith("pool files changed in what is read once")


EDITED = [{"models": ["a", "b", "c"]}, {"models": ["a", "b"], "rebuild": "30 2 * * 6"}]


@pytest.mark.parametrize("edit", EDITED)
def test_it_says_how_to_reload(settings: Settings, tiny_pool: PoolWriter, edit: dict[str, Any]) -> None:
    with watched(settings) as location:
        tiny_pool(**edit)
        told = location.tick()
        assert not told.requests and told.said is not None
        assert "reload it: in the UI under Deployment" in told.said and "SANDHI_WEBSERVER" in told.said


def test_a_change_of_anything_else_needs_no_reloading(settings: Settings, tiny_pool: PoolWriter) -> None:
    with watched(settings) as location:
        tiny_pool(["a", "b"], budget=0.5, deploy={"device_memory": "40GiB"})
        assert location.tick().requests


@contextmanager
def webserver(answer: Any) -> Iterator[tuple[str, list[Any]]]:
    """Something that answers like Dagster's webserver, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))["variables"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", asked
        finally:
            server.shutdown()
            thread.join()


def entry(**found: str) -> Any:
    loaded = {"__typename": "WorkspaceLocationEntry", "locationOrLoadError": found}
    return {"data": {"reloadRepositoryLocation": loaded}}


def test_it_has_the_webserver_reload_where_one_is_named(settings: Settings, tiny_pool: PoolWriter) -> None:
    with ExitStack() as stack:
        address, asked = stack.enter_context(webserver(entry(__typename="RepositoryLocation")))
        location = stack.enter_context(watched(replace(settings, webserver=address)))
        tiny_pool(["a", "b", "c"])
        first = location.tick()
        assert first.said == "pool files changed in what is read once: the code location is reloaded"
        assert asked == [("/graphql", {"name": "pipelines.definitions"})]
        # The daemon goes on with the location that it has until it sees the new one.
        again = location.tick(first.cursor)
        assert again.said == f"{first.said}, and is not seen here yet" and len(asked) == 1
        assert again.cursor == first.cursor is not None
        wanted, _, when = first.cursor.partition(" ")
        location.tick(f"{wanted} {float(when) - 121}")
        assert len(asked) == 2
        tiny_pool(["a", "b", "d"])
        location.tick(first.cursor)
        assert len(asked) == 3


def test_what_was_not_reloaded_is_asked_for_again(settings: Settings, tiny_pool: PoolWriter) -> None:
    with ExitStack() as stack:
        address, asked = stack.enter_context(webserver({"errors": []}))
        location = stack.enter_context(watched(replace(settings, webserver=address)))
        tiny_pool(["a", "b", "c"])
        location.tick(location.tick().cursor)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            entry(__typename="PythonError", message="no such module\n"),
            "could not reload the code location (no such module)",
        ),
        (
            {"data": {"reloadRepositoryLocation": {"__typename": "RepositoryLocationNotFound"}}},
            "(RepositoryLocationNotFound)",
        ),
        ({"errors": []}, "did not reload"),
        ([], "did not reload"),
    ],
)
def test_a_webserver_that_does_not_reload_is_told_of(answer: Any, said: str) -> None:
    with webserver(answer) as (address, _):
        found = reload_location(address, "pipelines.definitions")
    assert said in found and found.endswith("reload it: in the UI under Deployment, Code locations")


def test_no_webserver_is_told_of() -> None:
    assert "did not reload" in reload_location("http://127.0.0.1:1", "pipelines.definitions")


def ticking(definitions: dg.Definitions, moment: datetime) -> dg.ScheduleEvaluationContext:
    known = definitions.get_repository_def()
    return dg.build_schedule_context(scheduled_execution_time=moment, repository_def=known)


def test_one_schedule_serves_all_pools_each_at_its_time(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    folder = tmp_path / "pools"
    folder.mkdir()
    for name, cron in (("early", "0 3 * * *"), ("late", "30 3 * * 0-7"), ("never", None)):
        text = tiny_pool(["a", "wide"]).read_text().replace(" path: ", f" path: {tmp_path}/")
        text = text.replace("name: tiny", f"name: {name}").replace("include_path: ", f"include_path: {tmp_path}/")
        (folder / f"{name}.yaml").write_text(text + (f'rebuild: "{cron}"\n' if cron else ""))
    definitions = build_definitions(load_catalogue(folder.glob("*.yaml")), Settings(folder, tmp_path / "root"))
    schedule = definitions.resolve_schedule_def("nightly_rebuild")
    assert schedule.cron_schedule == ["0 3 * * *", "30 3 * * *"]

    def requested(hour: int, minute: int) -> dict[str | None, dict[str, str]]:
        moment = datetime(2026, 11, 30, hour, minute, tzinfo=UTC)
        found = schedule.evaluate_tick(ticking(definitions, moment))
        ours = (REGROUP_TAG, POOL_TAG)
        return {r.partition_key: {t: v for t, v in r.tags.items() if t in ours} for r in found.run_requests or []}

    for pool, time in (("early", (3, 0)), ("late", (3, 30))):
        assert requested(*time) == {
            f"{pool}.{group}": {REGROUP_TAG: "true", POOL_TAG: pool} for group in ("h32-bf16", "h64-bf16")
        }
    assert requested(4, 0) == {}


def test_a_schedule_that_nobody_asks_anything_of_says_so(settings: Settings) -> None:
    definitions = build_definitions(load_catalogue(settings.pool_files()), settings)
    schedule = definitions.resolve_schedule_def("nightly_rebuild")
    moment = datetime(2026, 11, 30, 3, tzinfo=UTC)
    found = schedule.evaluate_tick(ticking(definitions, moment))
    assert not found.run_requests and found.skip_message == "no pool file says `rebuild` for this time"


def test_settings_of_dagster_are_brought_up_to_date_unless_a_person_changed_them(tmp_path: Path) -> None:
    for kept, text in ((False, _FORMER_SETTINGS), (True, _FORMER_SETTINGS.replace("60", "90"))):
        home = tmp_path / str(kept) / "dagster"
        home.mkdir(parents=True)
        (home / "dagster.yaml").write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DAGSTER_HOME", str(home))
            assert dagster_home(home.parent) == home
        assert ((home / "dagster.yaml").read_text() == text) is kept


@pytest.mark.parametrize("given", ["cuda", "cuda:0,cpu", "gpu:1", "cuda:0;cuda:1"])
def test_devices_that_are_none_are_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDHI_DEVICES", given)
    with pytest.raises(UsageError, match="SANDHI_DEVICES is"):
        Settings.from_environment()


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDHI_DEVICES", "cuda:0, cuda:1,")
    monkeypatch.setenv("SANDHI_LOOK_SECONDS", "5")
    monkeypatch.setenv("SANDHI_RETRY_SECONDS", "")
    monkeypatch.delenv("SANDHI_WEBSERVER", raising=False)
    found = Settings.from_environment()
    assert (found.devices, found.slots, found.look_seconds) == (("cuda:0", "cuda:1"), 2, 5)
    assert (found.retry_seconds, found.webserver) == (30, None)
    monkeypatch.setenv("SANDHI_LOOK_SECONDS", "soon")
    with pytest.raises(UsageError, match="SANDHI_LOOK_SECONDS is 'soon'"):
        Settings.from_environment()
