from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance import artifact
from tests.conformance.candidates import RecordedClustering, recorded_clusterings
from tests.conformance.recorded import RecordedRun, recorded_runs

Found = Iterator[RecordedRun] | Iterator[RecordedClustering]


def _with_statistics(folder: Path) -> Iterator[RecordedClustering]:
    return (c for c in recorded_clusterings(folder) if c.statistics is not None)


KINDS: dict[str, Callable[[Path], Found]] = {
    "run": recorded_runs,
    "clustering": recorded_clusterings,
    "clustered": _with_statistics,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`run`, `clustering`, `clustered` (with the statistics that went in): everything of the kind that was recorded;
    one skipped case where nothing is there."""
    for name in KINDS.keys() & set(metafunc.fixturenames):
        found: list[RecordedRun | RecordedClustering] = [*KINDS[name](artifact())]
        if found:
            metafunc.parametrize(name, found, ids=[item.name for item in found])
        else:
            why = f"no recorded {name} at {artifact()} (SANDHI_ARTIFACT)"
            metafunc.parametrize(name, [pytest.param(None, marks=pytest.mark.skip(reason=why))], ids=["absent"])
