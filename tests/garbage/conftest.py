"""A root to collect from, made anew for every test from models that are made once."""

from pathlib import Path

import pytest

from tests.exported import make_case, make_models
from tests.garbage.roots import Root, make_root


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def root(directories: dict[str, Path], tmp_path: Path) -> Root:
    return make_root(make_case(tmp_path / "root", directories))
