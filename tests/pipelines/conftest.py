"""Pools for whole-line tests: the trained fixture pool, made once, and tiny random ones made in a moment."""

import functools
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml
from alembic.script import ScriptDirectory

from sandhi_core.__main__ import main
from sandhi_core.records import MemoryComparison, ProcessMemory
from sandhi_core.serving.engines import PYTHON
from tests.evaluation.local_tasks import choice_task
from tests.models import tiny_llama


@pytest.fixture(autouse=True)
def own_dagster_home() -> Iterator[None]:
    """Each root keeps its own Dagster instance, whatever was set before (the command line sets it)."""
    with without_home():
        yield


@contextmanager
def without_home() -> Iterator[None]:
    """No DAGSTER_HOME; what is set inside is gone afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", "unset")
        patch.delenv("DAGSTER_HOME")
        yield


# Dagster makes a database for every run, and reads its migrations anew each time: a fifth of a small run's time.
ScriptDirectory.from_config = staticmethod(functools.lru_cache(ScriptDirectory.from_config))  # type: ignore[method-assign, assignment]


@pytest.fixture
def only_the_line() -> Iterator[None]:
    """As `line_alone`, for a test."""
    with line_alone():
        yield


@contextmanager
def line_alone() -> Iterator[None]:
    """Neither memory nor pictures: other tests measure, in processes that take seconds to start, and look at what is
    drawn."""
    nothing = dict.fromkeys(("rss", "pss", "shared", "private", "private_dirty", "unmapped", "whole"), 0)
    process = ProcessMemory(model="nobody's", **nothing)
    engine = "not measured in this test"
    enough = MemoryComparison(engine=engine, originals=(), exports=(process,), shared=2**40, saved=2**40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("assets.sharing_proof.compare", lambda *_, **__: enough)
        patch.setattr("assets.pictures.png_bytes", lambda figure: b"")
        patch.setattr("assets.deployment.write_report", lambda directory, data: directory / "report.html")
        yield


def until_it_answers(address: str) -> None:
    """Wait for Dagster's webserver, which says that it serves before it listens."""
    end = time.monotonic() + 120
    while True:
        try:
            return urlopen(f"{address}/server_info", timeout=60).close()
        except URLError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def sandhi(*arguments: object, vllm: Path | None = None) -> tuple[int, str, str]:
    """Run a command in this process: exit status, standard output, standard error. Proofs measure with transformers,
    whatever is installed, unless the Python of a vLLM is given."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", "unset")
        patch.delenv("DAGSTER_HOME")
        patch.delenv(PYTHON, raising=False)
        if vllm is not None:
            patch.setenv(PYTHON, str(vllm))
        status = main([str(a) for a in arguments])
    return status, out.getvalue(), err.getvalue()


def built(pool: Path, root: Path, *options: str, vllm: Path | None = None) -> dict[str, Any]:
    """Build a pool; its document."""
    status, out, err = sandhi("build", pool, "--root", root, "--json", *options, vllm=vllm)
    assert status == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


@dataclass(frozen=True)
class Line:
    """A pool that was built once."""

    pool: Path
    root: Path
    document: dict[str, Any]

    @property
    def result(self) -> dict[str, Any]:
        (result,) = self.document["pools"].values()
        found: dict[str, Any] = result
        return found


@pytest.fixture(scope="session")
def line(trained_pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """The trained pool, built. Tests must leave it as it is."""
    root = tmp_path_factory.mktemp("line") / "root"
    return Line(trained_pool, root, built(trained_pool, root))


PoolWriter = Callable[..., Path]


@pytest.fixture
def tiny_pool(tmp_path: Path) -> PoolWriter:
    return pool_writer(tmp_path)


@pytest.fixture(scope="session")
def tiny_line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    """A pool of two random models, built. Tests may build it again and must leave it finished."""
    folder = tmp_path_factory.mktemp("tiny")
    pool = pool_writer(folder)(["a", "b"], owners=["team:letters"])
    return Line(pool, folder / "root", built(pool, folder / "root"))


def pool_writer(folder: Path) -> PoolWriter:
    """Writes a pool of random models that all answer one small task; calling it again edits the file."""
    choice_task(folder / "tasks")

    def write(models: Iterable[str], budget: float = 0.9, **sections: Any) -> Path:
        for name in models:
            if not (folder / name).exists():
                width = {"hidden_size": 64} if name.startswith("wide") else {}
                tiny_llama(folder / name, seed=sum(map(ord, name)), **width)
        pool = {
            "name": "tiny",
            "models": [
                {"name": m, "path": m, "tasks": [{"task": "letters", "metric": "acc", "budget": budget}]}
                for m in models
            ],
            "evaluation": {"include_path": "tasks", "dtype": "float32", "device": "cpu", "threads": 1},
        } | sections
        path = folder / "tiny.yaml"
        path.write_text(yaml.safe_dump(pool))
        return path

    return write
