"""The shape of the project itself: imports go one way, only the core is shipped, help is there."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    "sandhi_core",
    "resources",
    "assets",
    "pipelines",
)  # each may import itself and what stands before it


def imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_one_way(layer: str) -> None:
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files
    forbidden = set(LAYERS[LAYERS.index(layer) + 1 :]) | {"demo", "tests", "benchmarks"}
    if layer == "sandhi_core":
        forbidden.add("dagster")
    wrong = {str(f.relative_to(ROOT)): bad for f in files if (bad := imported(f) & forbidden)}
    assert not wrong


def test_assets_do_not_import_each_other() -> None:
    for file in sorted((ROOT / "assets").glob("*.py")):
        found = (n.module or "" for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom))
        assert {module for module in found if module.startswith("assets.")} <= {"assets.stage", "assets.pictures"}, file


@pytest.mark.parametrize("module", ["sandhi_core.pool", "sandhi_core.records", "sandhi_core.graph", "pipelines.cli"])
def test_light_modules_do_not_load_heavy_ones(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'lm_eval', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_wheel_holds_the_core_only(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"sandhi_core"}


@pytest.mark.parametrize("command", ["check", "build", "verify", "report", "schema"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    run = [sys.executable, "-m", "sandhi_core", command, "--help"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"example: sandhi {command}" in " ".join(done.stdout.split())
