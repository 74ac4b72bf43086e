"""The files that services are run from (deploy/ at the top), against the schemas of the tools that read them."""

import configparser
import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml
from dagster import DagsterInvalidConfigError
from dagster._core.instance.config import dagster_instance_config
from dagster._core.workspace.load import location_origins_from_yaml_paths

from pipelines.instance import _SETTINGS
from tests.conftest import CHECKOUT

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
