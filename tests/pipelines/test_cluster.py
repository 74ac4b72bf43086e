"""Where runs go: what definitions ask for there, and that the launchers' libraries take the files of docs/scale/."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import dagster as dg
import kubernetes_validate
import pytest
import yaml
from dagster._config import process_config, resolve_to_config_type
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.instance.config import dagster_instance_config
from dagster._core.instance.ref import InstanceRef
from dagster._core.launcher import LaunchRunContext
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin

from pipelines.assembly import build_definitions
from pipelines.cluster import NEEDS, Cluster
from pipelines.settings import CLUSTER, Settings
from sandhi_core.catalogue import load_catalogue
from sandhi_core.errors import UsageError
from tests.pipelines.conftest import PoolWriter

SCALE = Path(__file__).parents[2] / "docs" / "scale"
VERSIONS = ("1.25", "1.37")  # the oldest and the newest that kubernetes-validate has
GIVEN = "SANDHI_PG_HOST SANDHI_PG_USER SANDHI_PG_PASSWORD SANDHI_PG_DB DAGSTER_PG_PASSWORD".split()
MODULES = {"ray": ("dagster_ray", "ray"), "kubernetes": ("dagster_k8s",)}


def require(launcher: str) -> None:
    """Skips where the library of a launcher is not installed. That of Kubernetes must be where everything is tested."""
    missing = [module for module in MODULES[launcher] if importlib.util.find_spec(module) is None]
    if missing:
        absent = f"no {missing[0]}: install the extra of the same launcher"
        (pytest.fail if os.environ.get("CI") and launcher == "kubernetes" else pytest.skip)(absent)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., "Cluster | None"]:
    """The cluster that an environment names."""

    def chosen(name: str | None = None, scoring: str | None = None) -> Cluster | None:
        for variable, value in {CLUSTER: name, NEEDS: scoring}.items():
            monkeypatch.delenv(variable, raising=False)
            if value is not None:
                monkeypatch.setenv(variable, value)
        return Cluster.from_environment()

    return chosen


def tags(definitions: dg.Definitions) -> dict[str, dict[str, str]]:
    """By stage or pair of stages the tags that every run of its job carries."""
    jobs = definitions.get_repository_def().get_all_jobs()
    return {job.name.removeprefix("build_"): dict(job.tags) for job in jobs if job.name.startswith("build_")}


def test_nothing_chosen_is_this_machine_as_ever(on: Callable[..., Any], tiny_pool: PoolWriter, tmp_path: Path) -> None:
    assert on() is None and on("") is None
    pool = tiny_pool(["a"])
    definitions = build_definitions(load_catalogue([pool]), Settings(pool, tmp_path), cluster=on())
    assert not any(key.startswith("dagster-") for found in tags(definitions).values() for key in found)
    assert definitions.get_repository_def().get_job("build_plan").executor_def.name == "multi_or_in_process_executor"


@pytest.mark.parametrize(("launcher", "tag"), [("ray", "dagster-ray/config"), ("kubernetes", "dagster-k8s/config")])
def test_what_scores_asks_for_a_device(
    launcher: str, tag: str, on: Callable[..., Any], tiny_pool: PoolWriter, tmp_path: Path
) -> None:
    require(launcher)
    pool = tiny_pool(["a"])
    definitions = build_definitions(load_catalogue([pool]), Settings(pool, tmp_path), cluster=on(launcher))
    asked = {stage: found[tag] for stage, found in tags(definitions).items() if tag in found}
    assert set(asked) == {"profile", "groups", "trajectory", "holdout", "deployment"}  # the proof is in deployment's
    (needs,) = set(asked.values())
    assert "gpu" in needs
    assert definitions.get_repository_def().get_job("build_profile").executor_def.name == "in_process"
    assert tag not in str(
        tags(build_definitions(load_catalogue([pool]), Settings(pool, tmp_path), cluster=on(launcher, "{}")))
    )


@pytest.mark.parametrize(
    ("name", "scoring", "told"),
    [
        ("slurm", None, "set it to one of kubernetes, ray"),
        ("kubernetes", "{", "it is no JSON"),
        ("kubernetes", "[1]", "it is no JSON object"),
        ("kubernetes", '{"gpus": 1}', "gpus"),
        ("kubernetes", '{"container_config": {"resorces": {}}}', "resorces"),
        ("ray", '{"gpus": 1}', "gpus"),
        ("ray", '{"num_gpus": "many"}', "num_gpus"),
    ],
)
def test_what_cannot_be_chosen_is_one_clear_error(
    name: str, scoring: str | None, told: str, on: Callable[..., Any]
) -> None:
    if name in MODULES and "JSON" not in told:
        require(name)
    with pytest.raises(UsageError, match=told) as error:
        on(name, scoring)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "extra"), [("ray", "ray"), ("kubernetes", "k8s")])
def test_a_library_that_is_missing_is_named_with_its_extra(
    name: str, extra: str, on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("dagster_ray.core.run_launcher", "dagster_k8s.job"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"pipeline,{extra}\]"):
        on(name)


def test_devices_of_this_machine_are_none_of_a_cluster_s(
    on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDHI_DEVICES", "cuda:0,cuda:1")
    with pytest.raises(UsageError, match="unset it"):
        on("ray")
    assert on() is None


@pytest.mark.parametrize(("cluster", "slots"), [(None, [1]), (Cluster({}), [])])
def test_the_sensor_leaves_the_slots_of_a_cluster_to_its_instance(
    cluster: Cluster | None, slots: list[int], tiny_pool: PoolWriter, tmp_path: Path
) -> None:
    pool = tiny_pool(["a"])
    definitions = build_definitions(load_catalogue([pool]), Settings(pool, tmp_path / "root"), cluster=cluster)
    sensor = definitions.get_repository_def().get_sensor_def("rebuild_stale")
    with dg.DagsterInstance.ephemeral() as instance:
        tick = sensor.evaluate_tick(dg.build_sensor_context(instance, definitions=definitions))
        assert {request.job_name for request in tick.run_requests or []} == {"build_checkpoint"}
        assert [pool.limit for pool in instance.event_log_storage.get_pool_limits()] == slots


# --- the libraries' verdicts -------------------------------------------------------------------------------------


def settings(launcher: str, home: Path, **changed: Any) -> Path:
    """docs/scale's dagster.yaml of a launcher in `home`, with some of the launcher's own settings changed."""
    text = yaml.safe_load((SCALE / f"{launcher}.yaml").read_text())
    if importlib.util.find_spec("dagster_postgres") is None:
        del text["storage"]
    text["run_launcher"]["config"] |= changed
    home.mkdir()
    (home / "dagster.yaml").write_text(yaml.safe_dump(text))
    return home


@pytest.mark.parametrize("launcher", ["ray", "kubernetes"])
def test_the_launchers_take_the_files_of_the_documentation(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(launcher)
    for name in (*GIVEN, "SANDHI_IMAGE", "SANDHI_RAY_ADDRESS"):
        monkeypatch.setenv(name, "given")
    home = settings(launcher, tmp_path / "home")
    dagster_instance_config(str(home))  # raises where the file as a whole is wrong
    data = InstanceRef.from_dir(str(home)).run_launcher_data
    assert data is not None
    kind = getattr(importlib.import_module(data.module_name), data.class_name)
    schema = resolve_to_config_type(kind.config_type())
    found = process_config(schema, data.config_dict)
    assert found.success, [error.message for error in found.errors or []]
    assert not process_config(schema, {**data.config_dict, "adress": "x"}).success  # it does look


@contextmanager
def api_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Something that says yes to a new job as an API server does, and what it was sent."""
    sent: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            sent.append({"path": self.path, "body": body})
            self.send_response(201)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def kubeconfig(path: Path, address: str) -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": address}}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "nobody"}}],
        "current-context": "here",
    }
    path.write_text(yaml.safe_dump(document))
    return path


def test_the_job_that_kubernetes_is_sent_is_one(
    on: Callable[..., Any], tiny_pool: PoolWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real launcher makes the jobs of two runs and sends them; the API's own schemas take them."""
    require("kubernetes")
    monkeypatch.setenv("SANDHI_IMAGE", "registry.example/sandhi:1")
    pool = tiny_pool(["a"])
    definitions = build_definitions(load_catalogue([pool]), Settings(pool, tmp_path), cluster=on("kubernetes"))
    with api_server() as (address, sent):
        home = settings(
            "kubernetes",
            tmp_path / "home",
            load_incluster_config=False,
            kubeconfig_file=str(kubeconfig(tmp_path / "kubeconfig", address)),
        )
        text = yaml.safe_load((home / "dagster.yaml").read_text())
        text.pop("storage", None)  # there is no Postgres to be asked here
        (home / "dagster.yaml").write_text(yaml.safe_dump(text))
        with dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(home))) as instance:
            for stage in ("trajectory", "plan"):
                launch(instance, definitions, f"build_{stage}", "tiny.a")
    scored, other = (job["body"] for job in sent)
    assert {job["path"].partition("?")[0] for job in sent} == {"/apis/batch/v1/namespaces/sandhi/jobs"}
    for job in (scored, other):
        for version in VERSIONS:
            kubernetes_validate.validate(job, version, strict=True)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "registry.example/sandhi:1"
        assert {"name": "sandhi", "mountPath": "/sandhi"} in container["volumeMounts"]
        assert {"name": "sandhi", "persistentVolumeClaim": {"claimName": "sandhi"}} in job["spec"]["template"]["spec"][
            "volumes"
        ]
        assert "execute_run" in container["args"]
        assert job["spec"]["backoffLimit"] == 0  # the daemon tries again, not Kubernetes
    assert limits(scored) == {"memory": "16Gi", "nvidia.com/gpu": "1"}
    assert limits(other) == {"memory": "16Gi"}


def limits(job: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    return found


def launch(instance: dg.DagsterInstance, definitions: dg.Definitions, name: str, key: str) -> None:
    """What the daemon does with a run that it takes from the queue."""
    job = definitions.get_repository_def().get_job(name)
    code = RepositoryPythonOrigin(
        sys.executable, ModuleCodePointer("pipelines.definitions", "defs", str(SCALE.parents[1]))
    )
    run = instance.create_run_for_job(
        job, tags={**job.tags, "dagster/partition": key}, job_code_origin=JobPythonOrigin(name, code)
    )
    instance.run_launcher.launch_run(LaunchRunContext(run, None))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_objects_around_it_are_kubernetes_s(version: str) -> None:
    documents = list(yaml.safe_load_all((SCALE / "kubernetes-objects.yaml").read_text()))
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
    named = {(document["kind"], document["metadata"]["name"]) for document in documents}
    launcher = yaml.safe_load((SCALE / "kubernetes.yaml").read_text())["run_launcher"]["config"]
    assert ("PersistentVolumeClaim", launcher["volumes"][0]["persistentVolumeClaim"]["claimName"]) in named
    assert ("ServiceAccount", launcher["service_account_name"]) in named
    assert {("ConfigMap", name) for name in launcher["env_config_maps"]} <= named
    assert {document["metadata"]["namespace"] for document in documents} == {launcher["job_namespace"]}
