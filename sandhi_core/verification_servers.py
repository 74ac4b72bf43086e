"""Real servers of an export: what they hold beside those of the originals, and whether they answer as was scored."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandhi_core.claims import Claimed, claims_of
from sandhi_core.errors import Problem, SandhiError, UsageError
from sandhi_core.memory import Identity, accounts, shared_bytes, weight_files
from sandhi_core.originals import originals_of
from sandhi_core.pool import Pool
from sandhi_core.records import Manifest
from sandhi_core.serving.engines import Engine
from sandhi_core.serving.measure import Held, Prompts, hold, taken

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


def measured(
    root: Path, manifest: Manifest, measuring: Measuring
) -> tuple[dict[str, Any] | None, dict[str, Any] | None, list[Problem]]:
    """What servers of the export hold, and what they answer, as `sandhi verify` tells it; and what is wrong with that.
    Both are None where they could not be started.

    Raises UsageError for an engine that is not there, and originals of other models.
    """
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
    except UsageError:
        raise
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
        "sum": _sum(held),
        "originals": None,
        "saved": None,
    }
    if before is not None:
        table["originals"] = {"engine": before.engine, "servers": _servers(before), "sum": _sum(before)}
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


def _sum(held: Held) -> dict[str, int]:
    return {count: sum(getattr(process, count) for process in accounts(held.holders)) for count in _COUNTS}


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
        yield Problem(code="export-memory", severity="error", message=message, remedy=remedy)
    elif table["saved"] is not None and table["saved"] < claims.least_in_memory:
        message = (
            f"{claims.claimed} bytes are claimed, servers of the export take {table['saved']} less than those of the "
            "originals: they hold copies beside what they share"
        )
        yield Problem(code="export-memory", severity="error", message=message, remedy=remedy)


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
            yield Problem(
                code="export-answers",
                severity="error",
                model=model,
                message=f"served, {found['different']} of {found['tokens']} tokens are others than the scored weights "
                f"choose in {found['dtype']}, and log-probabilities differ by up to {found['largest']:.2g}",
                remedy="compare the engine's options (dtype, attention, quantization) with what was scored",
            )
