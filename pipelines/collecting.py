"""`sandhi gc`: what the artifact root holds for nobody, told, and removed where that is asked for."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pipelines.settings import Settings
from sandhi_core.artifacts import Artifacts
from sandhi_core.catalogue import load_catalogue
from sandhi_core.errors import Problem, SandhiError, StoreError
from sandhi_core.garbage.in_use import InUse, look
from sandhi_core.garbage.plan import Garbage, garbage
from sandhi_core.garbage.removal import freed, remove
from sandhi_core.garbage.using import alone
from sandhi_core.graph import Catalogue


def collect(path: Path, root: Path, *, keep: int = 1, gone: bool = False, apply: bool = False) -> dict[str, Any]:
    """What goes from the artifact root of a pool file, or of all in a directory; with `apply` it is gone then.

    Raises UsageError where there is no pool file, PoolError for one that cannot be read (nothing is removed then),
    StoreError where nothing was built in the root, where a build or a stage runs in it, for what cannot be removed, and
    for a record or directory that cannot be read (nothing is removed then).
    """
    settings = Settings.of_command(path, root)
    catalogue = load_catalogue(settings.given_files(), settings.placed)
    artifacts = settings.artifacts()
    if not (root / "records").is_dir():
        remedy = "give the --root in which the pools were built"
        raise StoreError("nothing was built in this artifact root", file=str(root), remedy=remedy)
    with alone(artifacts) if apply else nullcontext():
        inputs, problems = _inputs(catalogue, artifacts)
        in_use = look()
        try:
            found = garbage(catalogue, artifacts, in_use, keep=keep, gone=gone, inputs=inputs)
            sizes = freed(found.removals)
        except OSError as error:
            raise _unread(root, error) from error
        if apply:
            remove(root, found.removals)
    problems += _warnings(found, in_use)
    return {
        "ok": True,
        "problems": [problem.model_dump(mode="json") for problem in problems],
        "applied": apply,
        "freed": sum(sizes),
        "removals": [
            {"kind": removal.kind, "path": str(removal.path), "bytes": size}
            for removal, size in zip(found.removals, sizes, strict=True)
        ],
        "kept": [{"path": str(export.path), "why": export.why} for export in found.kept],
        "others": list(found.others),
    }


def _unread(root: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot be read, so that what is needed is not known, and nothing is removed: {error.strerror or error}",
        file=str(error.filename or root),
        remedy="run as the user that the artifact root belongs to; where its disk fails, build in another root",
    )


def _inputs(catalogue: Catalogue, artifacts: Artifacts) -> tuple[dict[str, str] | None, list[Problem]]:
    """By model what its inputs are kept under; None where that cannot be told of one."""
    if not any((artifacts.root / folder).is_dir() for folder in ("inputs", "spectra")):
        return {}, []
    from resources.bench import Bench  # loads lm-eval

    bench = Bench(catalogue, artifacts, lambda model, seconds: None)
    try:
        models = [m for m in catalogue.keys("model") if artifacts.envelope(("checkpoint", m)) is not None]
        return {model: bench.inputs(model).key for model in models}, []
    except SandhiError as error:
        told = f"what is kept in inputs/ and spectra/ stays: {error.problem.message}"
        return None, [error.problem.model_copy(update={"severity": "warning", "message": told})]


def _warnings(found: Garbage, in_use: InUse) -> list[Problem]:
    told = []
    if found.gone:
        message = f"no given file defines {', '.join(found.gone)}: what no process uses goes, the deployed export too"
        remedy = "give its file too (of a directory those right in it, *.yaml and *.yml), or leave --gone out"
        told.append(Problem(code="gone-pools", severity="warning", message=message, remedy=remedy))
    if in_use.unseen and any(removal.kind == "export" for removal in found.removals):
        message = f"what processes of other users map is not known: {in_use.unseen} could not be looked at"
        remedy = "run as root where servers belong to another user; a server keeps what it maps, and cannot start again"
        told.append(Problem(code="unseen", severity="warning", message=message, remedy=remedy))
    return told
