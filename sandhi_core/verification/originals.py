"""The checkpoints that an export was made from, found again."""

from collections.abc import Mapping
from pathlib import Path

from sandhi_core.artifacts import Artifacts
from sandhi_core.assignment import factors_among
from sandhi_core.checkpoints.checkpoint import Checkpoint, resolve
from sandhi_core.errors import Problem, ProofError, SandhiError, UsageError
from sandhi_core.pools.pool import ModelEntry, Pool
from sandhi_core.records import ExportedModel, Manifest


def artifacts_of(export_root: Path) -> Artifacts:
    """The artifact root that an export was written to, where it still lies there (exports/POOL/ID)."""
    return Artifacts(export_root.parents[2])


def originals_of(
    export_root: Path, manifest: Manifest, given: Mapping[str, Path], pool: Pool | None = None
) -> tuple[dict[str, Path], list[Problem]]:
    """By model, the directory of its own checkpoint: as `given`, or as the `pool` says, or as the records say among
    which the export lies. A warning for each model of which none of them knows one.

    Raises UsageError where one is given for a model that the export has not, ProofError where a checkpoint has other
    tensors than were exported, and CheckpointError where one that is given cannot be opened.
    """
    if strangers := sorted(given.keys() - manifest.models.keys()):
        raise UsageError(
            f"an original is given for {strangers[0]}, which the export does not hold",
            remedy=f"it holds {', '.join(sorted(manifest.models))}",
        )
    found: dict[str, Path] = {}
    problems: list[Problem] = []
    for name, model in sorted(manifest.models.items()):
        if name in given:
            found[name] = given[name]
            _require_same(Checkpoint.open(given[name], name), model)
            continue
        try:
            found[name] = original_of(export_root, name, model, pool)
        except SandhiError as error:
            problems.append(_unknown(name, error.problem.message))
    return found, problems


def original_of(export_root: Path, name: str, model: ExportedModel, pool: Pool | None = None) -> Path:
    """The directory of one model's own checkpoint, as the pool or the records say.

    Raises StoreError where they do not, CheckpointError where it is gone, ProofError as `originals_of`.
    """
    entry = next((entry for entry in pool.models if entry.name == name), None) if pool else None
    if entry is None:
        own = artifacts_of(export_root).required(("checkpoint", name)).own
        entry = ModelEntry.model_construct(name=name, path=own["path"], revision=own["revision"], tasks=())
    directory = resolve(entry)
    _require_same(Checkpoint.open(directory, name), model)
    return directory


def _require_same(checkpoint: Checkpoint, model: ExportedModel) -> None:
    """By names, dtypes and shapes: what is compared is their size, and that is enough for it."""
    added = factors_among(model.tensors)
    exported = {name: (t.dtype, tuple(t.shape)) for name, t in model.tensors.items() if name not in added}
    headers = {name: (h.dtype, tuple(h.shape)) for name, h in checkpoint.headers.items()}
    for name in sorted(exported.keys() | headers.keys()):
        if exported.get(name) != headers.get(name):
            raise ProofError(
                f"is {headers.get(name) or 'missing'} in the original, {exported.get(name) or 'missing'} in the export",
                model=checkpoint.model,
                file=str(checkpoint.directory),
                tensor=name,
                remedy="give the checkpoint that the export was made from, or leave it out",
            )


def _unknown(name: str, why: str) -> Problem:
    return Problem(
        code="originals",
        severity="warning",
        model=name,
        message=f"its original is not known, nothing is compared with one: {why}",
        remedy=f"give it by --originals {name}=DIRECTORY",
    )
