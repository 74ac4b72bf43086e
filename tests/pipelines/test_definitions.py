"""The code location as Dagster's own commands see it, as children with nothing but their environment."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from assets.stages import STAGE_ASSETS
from pipelines.instance import dagster_home
from sandhi_core.graph import STAGES
from tests.conftest import CHECKOUT, require
from tests.pipelines.conftest import PoolWriter

pytestmark = pytest.mark.slow

DG = CHECKOUT / ".venv-dg" / "bin" / "dg"


@pytest.fixture
def environment(tiny_pool: PoolWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    dagster_home(tmp_path / "root")
    pools = {"SANDHI_HOME": str(tmp_path / "root"), "SANDHI_POOLS": str(tiny_pool(["a", "b"]))}
    return {**os.environ, **pools, "PYTHONWARNINGS": "ignore"}  # each of the two commands warns in favour of the other


def test_dagster_definitions_validate(environment: dict[str, str]) -> None:
    """Of a bad pool file too, which is told of and left out: who mends it must find a sensor that sees it."""
    command = [
        str(Path(sys.executable).with_name("dagster")),
        "definitions",
        "validate",
        "--workspace",
        "workspace.yaml",
    ]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "All code locations passed validation" in done.stdout + done.stderr
    pool = Path(environment["SANDHI_POOLS"])
    pool.write_text(yaml.safe_dump(yaml.safe_load(pool.read_text()) | {"nonsense": 1}))
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "left out: error: pool: " in done.stderr and "nonsense" in done.stderr


def test_dg_check_defs(environment: dict[str, str], tmp_path: Path) -> None:
    """`dg` lies in an environment of its own, where it does not move this project's pins, and sees the project as part
    of a workspace: then it loads definitions with the project's Python."""
    require(DG, "dg", "`make .venv-dg/installed` installs it")
    require(CHECKOUT / ".venv" / "bin" / "python", "environment of the project", "`make .venv/installed` makes it")
    (tmp_path / "workspace").mkdir()
    project = os.path.relpath(CHECKOUT, tmp_path / "workspace")
    (tmp_path / "workspace" / "dg.toml").write_text(
        f'directory_type = "workspace"\n[workspace]\n[[workspace.projects]]\npath = "{project}"\n'
    )
    done = subprocess.run(
        [DG, "check", "defs"], cwd=tmp_path / "workspace", env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All definitions loaded successfully" in done.stdout


def test_the_graph_loads_without_what_only_steps_need(environment: dict[str, str]) -> None:
    """Every process that Dagster starts loads the graph: the sensor's, each run's, each step's."""
    heavy = {"lm_eval", "datasets", "matplotlib", "scipy.stats"}
    told = f"import sys, pipelines.definitions; print(sorted({heavy} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", told], cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_module_that_runs_it(stage: str) -> None:
    assert callable(import_module(f"assets.{stage}").run)
    assert STAGE_ASSETS[stage].name == stage
