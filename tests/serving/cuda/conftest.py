"""An export and an owner of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exported import Case, make_case, make_models
from tests.serving.cuda.owners import Owner, owning


@pytest.fixture(scope="package")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    models = make_models(tmp_path_factory.mktemp("models"))
    return make_case(tmp_path_factory.mktemp("case"), models)


@pytest.fixture(scope="package")
def root(case: Case) -> Path:
    return case.exported()[0]


@pytest.fixture(scope="package")
def owner(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    """An owner that the tests of a process share; those that end one start their own."""
    with owning(root, tmp_path_factory.mktemp("run") / "s") as started:
        assert started.ready
        yield started
