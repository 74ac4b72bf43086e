"""An export held to what it says of itself: digests, links, deployment; and, where it is asked, real servers."""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandhi_core.claims import Claimed, claims_of
from sandhi_core.deploy.check import check_deployment
from sandhi_core.disk import LINKS, DiskCheck, verify_disk
from sandhi_core.errors import Problem, ProofError, SandhiError, UsageError
from sandhi_core.layout import MANIFEST, read_manifest
from sandhi_core.memory import Identity, accounts, shared_bytes, weight_files
from sandhi_core.originals import originals_of
from sandhi_core.pool import Pool, load_pool
from sandhi_core.records import Manifest, ProcessMemory
from sandhi_core.serving.engines import Engine, python_of
from sandhi_core.serving.measure import Held, Prompts, hold, taken
from sandhi_core.verification_arguments import originals_given

_KINDS = ("private", "duplicate", "merged")
_COUNTS = ("rss", "pss", "shared", "private", "private_dirty", "unmapped", "whole")


@dataclass(frozen=True)
class Measuring:
    """What to measure an export with. `python`: of vLLM (engines.python_of). `originals`: checkpoint directories by
    model; what is not given is taken from `pool`, or looked up in the artifact root that the export lies in.
    `answers`: so many prompts a model are compared with the search's own evaluator."""

    engine: Engine = "transformers"
    python: str = ""
    originals: Mapping[str, Path] = field(default_factory=dict)
    pool: Pool | None = None
    answers: int = 0


def verify_all(arguments: Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the command answers to its arguments (verification_arguments): the document of one export, or of several
    `exports` with all their problems; and the tables of each. Raises as `verify` does, and UsageError for arguments
    that do not go together."""
    measuring = _measuring(arguments)
    tables = [verify(export.expanduser().resolve(), measuring)[0] for export in arguments.exports]
    if len(tables) == 1:
        return tables[0], tables
    problems = [problem for table in tables for problem in table["problems"]]
    return {"ok": all(table["ok"] for table in tables), "exports": tables, "problems": problems}, tables


def _measuring(arguments: Namespace) -> Measuring | None:
    if arguments.engine is None:
        asked = {"--python": arguments.python, "--originals": arguments.originals, "--answers": arguments.answers}
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

    Raises ProofError where there is no manifest; UsageError for an engine that is not there.
    """
    root = _root(export)
    found = read_manifest(root)
    disk = verify_disk(root, found)
    claims = claims_of(found)
    saved = claims.checkpoint_bytes - disk.distinct_bytes
    problems = [*disk.problems, *check_deployment(root, found)]
    if not disk.problems and saved != claims.claimed:
        problems.append(_wrong("export-links", f"the files save {saved} of {claims.claimed} bytes", LINKS))
    measured, answers = None, None
    if measuring is not None and not _errors(problems):
        measured, answers, told = _measured(root, found, measuring)
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
        "memory": measured,
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


def _wrong(code: str, message: str, remedy: str, model: str | None = None) -> Problem:
    return Problem(code=code, severity="error", model=model, message=message, remedy=remedy)


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


# --- measured -----------------------------------------------------------------------------------------------


def _measured(
    root: Path, manifest: Manifest, measuring: Measuring
) -> tuple[dict[str, Any] | None, dict[str, Any] | None, list[Problem]]:
    """What servers of the export hold and answer, and what is wrong with it."""
    directories = {name: root / model.directory for name, model in sorted(manifest.models.items())}
    problems: list[Problem] = []
    try:
        originals, unknown = originals_of(root, manifest, measuring.originals, measuring.pool)
        asked = _prompts(root, manifest, measuring)
        held = hold(directories, measuring.engine, measuring.python, prompts=asked)
        before = None
        if not unknown:
            before = hold(originals, measuring.engine, measuring.python, plugin=False)
        answers = _answers(root, manifest, measuring, held) if measuring.answers else None
    except SandhiError as error:
        return None, None, [error.problem]
    problems += unknown
    table = _table(root, manifest, held, before)
    problems += _not_shared(table, claims_of(manifest))
    if answers is not None:
        problems += _other_answers(answers)
    return table, answers, problems


def _table(root: Path, manifest: Manifest, held: Held, before: Held | None) -> dict[str, Any]:
    claims = claims_of(manifest)
    shared = shared_bytes(held.holders, _shared_files(root, manifest)) - claims.added
    table = {
        "engine": held.engine,
        "shared": min(max(shared, 0), claims.claimed),
        "servers": _servers(held),
        "sum": _sum(accounts(held.holders)),
        "originals": None,
        "saved": None,
    }
    if before is not None:
        table["originals"] = {
            "engine": before.engine,
            "servers": _servers(before),
            "sum": _sum(accounts(before.holders)),
        }
        table["saved"] = taken(accounts(before.holders)) - taken(accounts(held.holders))
    return table


def _servers(held: Held) -> dict[str, Any]:
    """By model the sum of its processes, each of them, and what it was asked."""
    processes: dict[str, list[dict[str, Any]]] = {}
    for holder, process in zip(held.holders, accounts(held.holders), strict=True):
        processes.setdefault(holder.model, []).append({"pid": holder.pid} | process.model_dump(exclude={"model"}))
    return {
        model: {count: sum(one[count] for one in found) for count in _COUNTS}
        | {"requests": len(held.completions[model]), "seconds": held.seconds[model], "processes": found}
        for model, found in sorted(processes.items())
    }


def _sum(processes: Sequence[ProcessMemory]) -> dict[str, int]:
    return {count: sum(getattr(process, count) for process in processes) for count in _COUNTS}


def _shared_files(root: Path, manifest: Manifest) -> dict[Identity, int]:
    """The files that hold a shared tensor, and its size in bytes."""
    found: dict[Identity, int] = {}
    for model in manifest.models.values():
        files = weight_files(root / model.directory).paths
        for tensor in model.tensors.values():
            if tensor.sharing != "private":
                found[files[str((root / model.directory / tensor.file).resolve())]] = tensor.nbytes
    return found


def _not_shared(table: Mapping[str, Any], claims: Claimed) -> Iterator[Problem]:
    remedy = "keep the export on a file system that maps one file into several processes as the same pages"
    if table["shared"] < claims.least_in_memory:
        message = f"{claims.claimed} bytes are claimed, processes that load the export share {table['shared']}"
        yield _wrong("export-memory", message, remedy)
    elif table["saved"] is not None and table["saved"] < claims.least_in_memory:
        message = (
            f"{claims.claimed} bytes are claimed, servers of the export take {table['saved']} less than those of the "
            "originals: they hold copies beside what they share"
        )
        yield _wrong("export-memory", message, remedy)


# --- answers ------------------------------------------------------------------------------------------------
# What needs the evaluator is imported where it is asked for: it is not there where exports are only served.


def _prompts(root: Path, manifest: Manifest, measuring: Measuring) -> Prompts | None:
    if not measuring.answers:
        return None
    from sandhi_core.evaluation.served import prompts_of

    return prompts_of(root, manifest, measuring.pool, measuring.answers)


def _answers(root: Path, manifest: Manifest, measuring: Measuring, held: Held) -> dict[str, Any]:
    from sandhi_core.evaluation.served import compared

    return {
        name: compared(root, manifest, name, held.completions[name], measuring.pool)._asdict()
        for name in sorted(manifest.models)
    }


def _other_answers(answers: Mapping[str, Any]) -> Iterator[Problem]:
    for model, found in answers.items():
        if not found["equal"]:
            yield _wrong(
                "export-answers",
                f"served, {found['different']} of {found['tokens']} tokens are others than the scored weights choose "
                f"in {found['dtype']}, and log-probabilities differ by up to {found['largest']:.2g}",
                "compare the engine's options (dtype, attention, quantization) with what was scored",
                model,
            )
