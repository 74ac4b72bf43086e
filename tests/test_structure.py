"""The shape of the project itself: imports go one way, only the core is shipped, help is there."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import require_vllm

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


SHARED_BY_ASSETS = {f"assets.{part}" for part in ("stage", "pictures", "tables", "telling", "verdicts")}


def test_assets_do_not_import_each_other() -> None:
    for file in sorted((ROOT / "assets").glob("*.py")):
        found = (n.module or "" for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom))
        assert {module for module in found if module.startswith("assets.")} <= SHARED_BY_ASSETS, file


@pytest.mark.parametrize(
    "module", ["sandhi_core.pools.pool", "sandhi_core.records", "sandhi_core.graph", "sandhi_core.cli", "pipelines.cli"]
)
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


def test_the_wheel_alone_serves_renders_and_verifies(tmp_path: Path) -> None:
    """The package as the wheel installs it, with nothing of the checkout beside it."""
    shutil.copytree(ROOT / "sandhi_core", tmp_path / "sandhi_core", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from sandhi_core.__main__ import main; sys.exit(main())"
    expected = {"serve --help": 0, "render --help": 0, "verify --help": 0, f"verify {tmp_path}": 1, "build p.yaml": 2}
    for given, status in expected.items():
        run = [sys.executable, "-I", "-c", code, *given.split()]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert ("needs a checkout" in done.stderr) == (status == 2)
    run = [sys.executable, "-I", "-c", code, "--help"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "{serve,render,verify}" in done.stdout and "build, report, gc, schema need a checkout" in done.stdout


@pytest.mark.parametrize("command", ["serve", "render", "gc"])
def test_every_command_that_serves_has_help_with_examples(command: str) -> None:
    run = [sys.executable, "-m", "sandhi_core", command, "--help"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"examples: sandhi {command}" in " ".join(done.stdout.split())


@pytest.mark.parametrize("command", ["check", "build", "verify", "report", "schema"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    run = [sys.executable, "-m", "sandhi_core", command, "--help"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"example: sandhi {command}" in " ".join(done.stdout.split())


@pytest.mark.parametrize("demand", [{}, {"CI": "true"}, {"SANDHI_REQUIRE_VLLM": "1"}])
def test_vllm_is_not_done_without_where_it_must_be(demand: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "SANDHI_REQUIRE_VLLM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in demand.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        pytest.fail.Exception if demand else pytest.skip.Exception, match="no vLLM: /nowhere is missing"
    ):
        require_vllm(Path("/nowhere"))
    require_vllm(Path(sys.executable))
