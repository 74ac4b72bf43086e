"""Real servers of an export: what they hold beside those of the originals, and whether they answer as was scored."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandhi_core.claims import Claimed, claims_of
from sandhi_core.deploy.spec import DeploymentSpec
from sandhi_core.errors import Problem, SandhiError, UsageError
from sandhi_core.layout import DEPLOYMENT
from sandhi_core.memory import accounts
from sandhi_core.pools.pool import Engine, Pool
from sandhi_core.records import Manifest
from sandhi_core.serving.measure import Held, Prompts, hold, served_from, shared, taken
from sandhi_core.verification.originals import originals_of

_COUNTS = ("rss", "pss", "shared", "private", "private_dirty", "unmapped", "whole")


@dataclass(frozen=True)
class Measuring:
    """What to measure an export with. `engine`: vllm leaves out what a deployment on vLLM gives to transformers.
    `python`: of vLLM (engines.python_of). `originals`: checkpoint directories by
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
    What could not be had is None, with a problem that says why; what was measured before is told all the same.

    Raises UsageError for an engine or an evaluator that is not there, and originals of other models.
    """
    try:
        originals, problems = originals_of(root, manifest, measuring.originals, measuring.pool)
        prompts, unasked = _prompts(root, manifest, measuring)
        problems += unasked
        engines = _engines(root, manifest, measuring.engine)
        held = hold(served_from(root, manifest), engines, measuring.python, prompts=prompts)
    except UsageError:
        raise
    except SandhiError as error:
        return None, None, error.problems
    before, answers = None, None
    try:
        if originals.keys() == manifest.models.keys():
            before = hold(originals, engines, measuring.python, plugin=False)
    except SandhiError as error:
        problems += error.problems
    try:
        if prompts is not None:
            answers = _answers(root, manifest, measuring, held)
    except SandhiError as error:
        problems += error.problems
    table = _table(root, manifest, held, before)
    problems += _not_shared(table, claims_of(manifest))
    problems += _other_answers(answers or {}, measuring.answers)
    return table, answers, problems


def _engines(root: Path, manifest: Manifest, asked: Engine) -> dict[str, Engine]:
    """By model. Where vLLM is asked for, and the pool is deployed on it, what does not run there is not asked of it."""
    spec = DeploymentSpec.parse((root / DEPLOYMENT).read_bytes())
    own = {server.model: server.engine for server in spec.servers} if asked == spec.engine == "vllm" else {}
    return dict.fromkeys(manifest.models, asked) | own


def _table(root: Path, manifest: Manifest, held: Held, before: Held | None) -> dict[str, Any]:
    table = {
        "engine": held.engine,
        "shared": shared(held, root, manifest),
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


def _prompts(root: Path, manifest: Manifest, measuring: Measuring) -> tuple[Prompts | None, list[Problem]]:
    """None where no answers are to be compared, or cannot be, and why: what servers hold is measured all the same."""
    if not measuring.answers:
        return None, []
    try:
        from sandhi_core.verification.answers import prompts_of, require_comparable
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--answers needs what scores models, and {error.name} is not installed here",
            remedy="pip install 'sandhi[pipeline]' into an environment of its own, or leave --answers out",
        ) from error
    try:
        require_comparable(manifest)
        return prompts_of(root, manifest, measuring.pool, measuring.answers), []
    except UsageError:
        raise
    except SandhiError as error:
        return None, error.problems


def _answers(root: Path, manifest: Manifest, measuring: Measuring, held: Held) -> dict[str, Any]:
    from sandhi_core.verification.answers import compared

    return {
        name: compared(root, manifest, name, held.completions[name], measuring.pool)._asdict()
        for name in sorted(manifest.models)
    }


def _other_answers(answers: Mapping[str, Any], asked: int) -> Iterator[Problem]:
    """Where answers are others than the scored weights give, or fewer than were asked for."""
    for model, found in answers.items():
        if not found["prompts"]:
            message, remedy = "nothing was asked: there is no prompt of two tokens", "give the pool file by --pool"
            yield Problem(code="export-answers", severity="error", model=model, message=message, remedy=remedy)
        elif not found["equal"]:
            yield Problem(
                code="export-answers",
                severity="error",
                model=model,
                message=f"served, {found['different']} of {found['tokens']} tokens are others than the scored weights "
                f"choose in {found['dtype']}, {found['ties']} of them nearly tied, and log-probabilities differ by up "
                f"to {found['largest']:.2g}",
                remedy="compare the engine's options (dtype, attention, quantization) with what was scored",
            )
        elif found["prompts"] < asked:
            message = f"there are {found['prompts']} prompts for it, {asked} were to be compared"
            remedy = f"ask for {found['prompts']}, or give a pool whose holdout has as many questions"
            yield Problem(code="export-answers", severity="warning", model=model, message=message, remedy=remedy)
