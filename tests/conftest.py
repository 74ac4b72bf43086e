"""Settings of all tests, and the trained models that whole-line tests use."""

from sandhi_core.offline import work_offline

work_offline()

import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import yaml  # noqa: E402
from filelock import FileLock  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("sandhi", deadline=None)  # correctness tests never depend on time
settings.load_profile("sandhi")

CHECKOUT = Path(__file__).parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: the quick ones then fill what is left, and both processes end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


SPECIALISTS = {"sorter": "sandhi_sort", "converter": "sandhi_units", "inflector": "sandhi_past"}
OUTSIDER = {"roman": "sandhi_roman"}


VLLM = Path(os.environ.get("SANDHI_VLLM_PYTHON") or CHECKOUT / ".venv-vllm" / "bin" / "python")


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of an environment with vLLM."""
    require_vllm(VLLM)
    return VLLM


def require_vllm(python: Path) -> None:
    require(python, "vLLM", "`make .venv-vllm/installed` installs it, or set SANDHI_VLLM_PYTHON")


def require(program: Path, name: str, remedy: str) -> None:
    """Skips the test where a program is missing. Where it must be there (CI, `make test`) it fails: skips go
    unnoticed."""
    if not program.exists():
        absent = f"no {name}: {program} is missing; {remedy}"
        (pytest.fail if os.environ.get("CI") or os.environ.get("SANDHI_REQUIRE_VLLM") else pytest.skip)(absent)


@pytest.fixture(scope="session")
def trained() -> Path:
    """The fixture pool's folder (models/, tasks/): trained at the first run of the tests, then kept."""
    folder = CHECKOUT / ".sandhi-demo" / "fixture"
    folder.parent.mkdir(exist_ok=True)
    make = [sys.executable, "-m", "demo.make_pool", str(folder), "--size", "fixture"]
    with FileLock(folder.with_suffix(".lock")):  # tests run in two processes
        subprocess.run(make, cwd=CHECKOUT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def trained_pool(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three specialists and the outsider, with budgets under which something can be shared."""
    models = [
        {"name": m, "path": str(trained / "models" / m), "tasks": [{"task": t, "metric": "acc", "budget": 0.06}]}
        for m, t in {**SPECIALISTS, **OUTSIDER}.items()
    ]
    evaluation = {"include_path": str(trained / "tasks"), "dtype": "float32", "device": "cpu", "threads": 1}
    path = tmp_path_factory.mktemp("pools") / "trained.yaml"
    path.write_text(yaml.safe_dump({"name": "trained", "models": models, "evaluation": evaluation}))
    return path
