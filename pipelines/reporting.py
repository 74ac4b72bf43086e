"""`sandhi report`: has a pool's report written from its newest records."""

from dataclasses import fields
from pathlib import Path

from pipelines.settings import Settings
from sandhi_core.catalogue import load_catalogue
from sandhi_core.errors import PoolError, Problem, SandhiError, StoreError
from sandhi_core.files import writing
from sandhi_core.report import write_report
from sandhi_core.report.gathering import gather

_NO_RECORDS = ("pool", "never", "stale", "waiting")


def report(path: Path, root: Path) -> tuple[list[Path], list[Problem]]:
    """Write the report of a pool file, or of every pool file in a directory; what cannot be reported is a problem.

    Raises UsageError where a directory holds no pool file, PoolError where the one file that is named is none.
    """
    pages, problems = list[Path](), list[Problem]()
    for file in Settings(path, root).given_files():
        try:
            pages.append(report_pool(file, root))
        except SandhiError as error:
            if isinstance(error, PoolError) and file == path:
                raise
            problems += error.problems
    return pages, problems


def report_pool(file: Path, root: Path) -> Path:
    """Write the report of the pool's newest records; stages that have not run are reported as not measured, and
    the page says at its head in what it is not of the pool file as it stands.

    Raises StoreError where none has: a root in which the pool was never built is most likely the wrong one.
    """
    settings = Settings.of_command(file, root)
    catalogue = load_catalogue([file], settings.placed)
    (name,) = catalogue.pools
    artifacts = settings.artifacts()
    data = gather(catalogue, name, artifacts)
    if not any(getattr(data, part.name) for part in fields(data) if part.name not in _NO_RECORDS):
        raise StoreError(
            f"nothing of pool {name} has been built in this artifact root",
            file=str(root),
            remedy=f"run `sandhi build {file}` first, or give the --root in which it was built",
        )
    directory = artifacts.directory("reports", name)
    with writing(directory):
        return write_report(directory, data)
