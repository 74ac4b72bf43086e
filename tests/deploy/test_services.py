"""The files that services are run from (deploy/ at the top), against the schemas of the tools that read them."""

import configparser
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml
from dagster import DagsterInstance, DagsterInvalidConfigError
from dagster._core.instance.config import dagster_instance_config
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin
from dagster._core.workspace.load import location_origins_from_yaml_paths
from dagster._grpc.client import DagsterGrpcClient

from pipelines.instance import _SETTINGS
from tests.conftest import CHECKOUT
from tests.pipelines.conftest import pool_writer

DEPLOY = CHECKOUT / "deploy"
COMPOSE = (DEPLOY / "compose.yaml").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SERVICES = ("postgres", "code", "webserver", "daemon")
PINNED = re.compile(r"[a-z/]+:\d+\.\d+(\.\d+)?(-[a-z-]+)?")


def test_compose_takes_it() -> None:
    found = compose_spec.PyCompose.from_yaml(_plain(COMPOSE))
    assert sorted(found.service_names()) == sorted(SERVICES)
    with pytest.raises(ValueError, match="wrong"):  # it does look at every field
        compose_spec.PyCompose.from_yaml(_plain(COMPOSE).replace("command:", "wrong:"))


def _plain(text: str) -> str:
    """As Compose reads it: variables filled in, anchors followed, extensions aside."""
    filled = re.sub(r"\$\{(\w+)(:\?[^}]*)?\}", lambda found: f"/{found[1].lower()}", text)
    document = yaml.safe_load(filled)
    return yaml.safe_dump({name: part for name, part in document.items() if not name.startswith("x-")})


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE)["services"]
    return found


def test_every_image_has_a_version() -> None:
    (base,) = re.findall(r"^FROM (\S+)$", DOCKERFILE, re.MULTILINE)
    for image in (base, *(service["image"] for service in services().values())):
        assert PINNED.fullmatch(image), image
    assert services()["code"]["image"] == f"sandhi:{version('sandhi')}"


def test_the_image_holds_what_the_services_run_and_nothing_is_copied_that_is_not_there() -> None:
    copied = re.findall(r"^COPY (?:--\S+ )?(.+) \S+$", DOCKERFILE, re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert all((CHECKOUT / source).exists() for source in sources)
    let_in = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    assert let_in == set(sources)
    packages = {p.parent.name for p in CHECKOUT.glob("*/__init__.py")} - {"tests", "demo", "benchmarks"}
    assert packages <= set(sources)


def test_what_is_installed_beside_goes_with_this_dagster() -> None:
    """Dagster's libraries count 0.(16 + minor).patch beside its own 1.minor.patch."""
    _, minor, patch = map(int, version("dagster").split("."))
    assert f"dagster-postgres==0.{16 + minor}.{patch} " in DOCKERFILE


def test_services_find_each_other() -> None:
    found = services()
    (origin,) = location_origins_from_yaml_paths([str(DEPLOY / "workspace.yaml")])
    assert (origin.host, origin.port) == ("code", 4000) and "code" in found  # type: ignore[attr-defined]
    code = found["code"]["command"]
    assert code[code.index("--port") + 1] == str(origin.port)  # type: ignore[attr-defined]
    settings = yaml.safe_load((DEPLOY / "dagster.yaml").read_text())["storage"]["postgres"]["postgres_db"]
    postgres = found[settings["hostname"]]["environment"]
    assert (settings["username"], settings["db_name"]) == (postgres["POSTGRES_USER"], postgres["POSTGRES_DB"])
    for name in ("code", "webserver", "daemon"):
        assert settings["password"]["env"] in found[name]["environment"]
        assert [v.rpartition(":")[0].rpartition(":")[2] for v in found[name]["volumes"]][1] == "/srv/pools"
    _, _, port = found["webserver"]["ports"][0].split(":")
    assert found["code"]["environment"]["SANDHI_WEBSERVER"] == f"http://webserver:{port}"


@pytest.mark.slow
def test_the_code_service_loads_pool_files_anew_when_it_is_told_to(tmp_path: Path) -> None:
    """Its own command, for real: what the webserver asks of it where the sensor sees that pool files changed."""
    write = pool_writer(tmp_path)
    pool = write(["a"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, *arguments = services()["code"]["command"]
    arguments = ["127.0.0.1" if a == "0.0.0.0" else str(port) if a == "4000" else a for a in arguments]
    (tmp_path / "home").mkdir()
    homes = {"DAGSTER_HOME": str(tmp_path / "home"), "SANDHI_HOME": str(tmp_path / "root"), "SANDHI_POOLS": str(pool)}
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    with subprocess.Popen(command, cwd=CHECKOUT, env={**os.environ, **homes}, stderr=subprocess.DEVNULL) as server:
        try:
            client = DagsterGrpcClient(port=port, host="127.0.0.1")
            assert _schedule(client, port) == "0 3 * * *"
            write(["a"], rebuild="30 2 * * 6")
            client.reload_code(timeout=120)
            assert _schedule(client, port) == ["30 2 * * 6"]
        finally:
            server.terminate()


def _schedule(client: DagsterGrpcClient, port: int) -> Any:
    """When the code location that is served rebuilds pools."""
    deadline = time.monotonic() + 120
    while client.health_check_query() != "SERVING" and time.monotonic() < deadline:
        time.sleep(0.2)
    with (
        DagsterInstance.ephemeral() as instance,
        GrpcServerCodeLocationOrigin(host="127.0.0.1", port=port).create_location(instance) as location,
    ):
        (repository,) = location.get_repositories().values()
        return repository.get_schedule("nightly_rebuild").cron_schedule


def test_dagster_takes_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_POSTGRES_PASSWORD", "secret")
    text = (DEPLOY / "dagster.yaml").read_text()
    (tmp_path / "dagster.yaml").write_text(text)
    found, _ = dagster_instance_config(str(tmp_path))
    assert found["storage"]["postgres"]["postgres_db"]["password"] == {"env": "DAGSTER_POSTGRES_PASSWORD"}
    (tmp_path / "dagster.yaml").write_text(text.replace("hostname:", "wrong:"))
    with pytest.raises(DagsterInvalidConfigError, match="wrong"):
        dagster_instance_config(str(tmp_path))


def test_its_settings_go_beyond_those_that_sandhi_writes() -> None:
    written, given = yaml.safe_load(_SETTINGS), yaml.safe_load((DEPLOY / "dagster.yaml").read_text())
    assert within(written, given) == written


def within(wanted: Any, given: Any) -> Any:
    """What `given` says of all that `wanted` speaks of."""
    if not isinstance(wanted, dict):
        return given
    return {name: within(value, given.get(name)) for name, value in wanted.items()}


@pytest.mark.parametrize("name", ["webserver", "daemon"])
def test_units_start_programs_that_are_installed_with_the_settings_that_are_documented(name: str) -> None:
    unit = configparser.RawConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / f"sandhi-{name}.service")
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert program == f"/opt/sandhi/.venv/bin/dagster-{name}"
    assert (CHECKOUT / arguments[arguments.index("--workspace") + 1]).is_file()
    document = (CHECKOUT / "docs" / "operating.md").read_text()
    assert service["EnvironmentFile"] in document and service["WorkingDirectory"] in document
    for line in (DEPLOY / "environment").read_text().splitlines()[1:]:
        assert line.partition("=")[0] in document, line
