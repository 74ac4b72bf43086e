"""An export held to what it says of itself: digests, links, deployment; and, where it is asked, real servers."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandhi_core.claims import Claimed, claims_of
from sandhi_core.deploy.check import check_deployment
from sandhi_core.disk import LINKS, DiskCheck, verify_disk
from sandhi_core.errors import Problem, ProofError, UsageError
from sandhi_core.layout import MANIFEST, read_manifest
from sandhi_core.pools.pool import load_pool
from sandhi_core.records import Manifest
from sandhi_core.serving.engines import python_of
from sandhi_core.verification.arguments import originals_given
from sandhi_core.verification.servers import Measuring, measured

_KINDS = ("private", "duplicate", "merged")


def verify_all(arguments: Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the command answers to its arguments (verification.arguments): the document of one export, or of several
    `exports` with all their problems; and the tables of each. Raises UsageError for arguments that do not go together,
    and of one export as `verify` does; of several the table of one that cannot be looked at is what is wrong with it.
    """
    measuring = _measuring(arguments)
    exports = [export.expanduser().resolve() for export in arguments.exports]
    if len(exports) == 1:
        table = verify(exports[0], measuring)[0]
        return table, [table]
    tables = [_verified(export, measuring) for export in exports]
    problems = [problem for table in tables for problem in table["problems"]]
    return {"ok": all(table["ok"] for table in tables), "exports": tables, "problems": problems}, tables


def _verified(export: Path, measuring: Measuring | None) -> dict[str, Any]:
    try:
        return verify(export, measuring)[0]
    except ProofError as error:
        return {"ok": False, "export": str(export), "problems": [error.problem.model_dump(mode="json")]}


def _measuring(arguments: Namespace) -> Measuring | None:
    if arguments.engine is None:
        asked = {f"--{name}": getattr(arguments, name) for name in ("python", "originals", "pool", "answers")}
        if idle := [option for option, value in asked.items() if value]:
            raise UsageError(f"{idle[0]} needs --engine", remedy="say --engine transformers or --engine vllm")
        return None
    if arguments.answers < 0:
        raise UsageError(f"--answers {arguments.answers} is no number of prompts", remedy="give 1 or more")
    if arguments.python and arguments.engine != "vllm":
        raise UsageError(
            "--python is of vLLM; transformers run in this one", remedy="leave it out, or say --engine vllm"
        )
    python_of(arguments.engine, arguments.python)  # before files are read, which may take long
    return Measuring(
        arguments.engine,
        arguments.python,
        originals_given(arguments.originals),
        None if arguments.pool is None else load_pool(arguments.pool),
        arguments.answers,
    )


def verify(export: Path, measuring: Measuring | None = None) -> tuple[dict[str, Any], bool]:
    """Check an export, given by its directory or its manifest, as it lies there: every byte and link against the
    manifest, deployment.json against both. With `measuring`, servers load and answer, and the table says what they
    share. Returns the table and whether all is well.

    Raises ProofError where there is no manifest, and UsageError as `measured` does.
    """
    root = _root(export)
    found = read_manifest(root)
    disk = verify_disk(root, found)
    claims = claims_of(found)
    saved = claims.checkpoint_bytes - disk.distinct_bytes
    problems = [*disk.problems, *check_deployment(root, found)]
    if not disk.problems and saved != claims.claimed:
        problems.append(_wrong("export-links", f"the files save {saved} of {claims.claimed} bytes", LINKS))
    memory, answers = None, None
    if measuring is not None and not _errors(problems):
        memory, answers, told = measured(root, found, measuring)
        problems += told
    table = {
        "ok": not _errors(problems),
        "export": str(root),
        "manifest": found.digest,
        "pool": found.pool,
        "point": found.point,
        "models": {name: _row(found, name) for name in sorted(found.models)},
        "tensors_checked": disk.tensors_checked,
        "bytes": _bytes(disk, claims),
        "memory": memory,
        "answers": answers,
        "problems": [problem.model_dump(mode="json") for problem in problems],
    }
    return table, not _errors(problems)


def _root(export: Path) -> Path:
    if not export.is_file():
        return export
    if export.name == MANIFEST:
        return export.parent
    raise ProofError(
        "is a file, not the directory of an export",
        file=str(export),
        remedy=f"give the directory that holds {MANIFEST}",
    )


def _errors(problems: Sequence[Problem]) -> bool:
    return any(problem.severity == "error" for problem in problems)


def _wrong(code: str, message: str, remedy: str) -> Problem:
    return Problem(code=code, severity="error", message=message, remedy=remedy)


def _row(manifest: Manifest, name: str) -> dict[str, Any]:
    model = manifest.models[name]
    kinds = {kind: [t for t in model.tensors.values() if t.sharing == kind] for kind in _KINDS}
    return {"weights": model.weights, "linked": model.linked} | {
        kind: {"tensors": len(tensors), "bytes": sum(t.nbytes for t in tensors)} for kind, tensors in kinds.items()
    }


def _bytes(disk: DiskCheck, claims: Claimed) -> dict[str, int]:
    return {
        "checkpoints": claims.checkpoint_bytes,
        "claimed": claims.claimed,
        "saved": claims.checkpoint_bytes - disk.distinct_bytes,
        "models": disk.tensor_bytes,
        "distinct": disk.distinct_bytes,
        "shared": disk.shared_bytes,
        "added": claims.added,
    }
