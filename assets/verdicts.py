"""What the checks of a proof say, each with the numbers that it was decided by: Dagster plots those over time."""

from collections.abc import Mapping
from typing import Any

from assets.stage import Check
from assets.tables import table
from sandhi_core.cutoffs import EPSILON
from sandhi_core.pools.pool import Engine, Pool
from sandhi_core.records import HoldoutScore, SharingProof
from sandhi_core.report import ReportData, page
from sandhi_core.report.stages import processes_table
from sandhi_core.serving.engines import PYTHON
from sandhi_core.words import count, percent, size


def verdicts(
    pool: Pool,
    proof: SharingProof,
    least: int,
    holdouts: Mapping[str, HoldoutScore],
    engines: Mapping[str, Engine],
) -> tuple[Check, ...]:
    """All checks of a proof. `least`: the bytes that processes must save; `holdouts`: those of the deployed point;
    `engines`: what each model's memory was measured with."""
    return (
        _exported_is_scored(proof),
        within_budget(pool, holdouts),
        certified(pool, holdouts),
        _bytes_on_disk(proof),
        _bytes_in_memory(proof, least),
        measured_as_deployed(pool, engines),
    )


def _exported_is_scored(proof: SharingProof) -> Check:
    told = "; ".join(proof.problems) or "every digest and answer equal, every claimed byte saved"
    numbers = {
        "tensors read again": proof.tensors_checked,
        "questions compared": sum(proof.questions_checked.values()),
        "answers equal": sum(proof.questions_equal.values()),
        "problems": len(proof.problems),
    }
    return Check("exported_is_scored", proof.passed, told, numbers)


def within_budget(pool: Pool, holdouts: Mapping[str, HoldoutScore]) -> Check:
    """Every model's deployed weights against the budgets that the pool file has now."""
    sure = pool.holdout.quality == "certified"
    changes = {
        (entry.name, task.task, task.budget): found.bound if sure else found.difference
        for entry in pool.models
        for task in entry.tasks
        for found in [holdouts[entry.name].tasks[task.task]]
    }
    over = [
        f"{model}, {task}: {change:+.4f}, budget {budget:g}"
        for (model, task, budget), change in changes.items()
        if -change > budget + EPSILON
    ]
    how = "with 95 % confidence, " if sure else ""
    numbers: dict[str, Any] = {
        "every model": table(page.models_table(ReportData(pool, holdouts=holdouts))),
        "out of budget": len(over),
        "largest share of a budget used": max(-change / budget for (*_, budget), change in changes.items()),
    }
    told = "; ".join(over) or f"every model, {how}on questions never used before"
    return Check("within_budget", not over, told, numbers)


def certified(pool: Pool, holdouts: Mapping[str, HoldoutScore]) -> Check:
    """Whose budgets hold at 95 % confidence; an error only where the pool asks for that."""
    tasks = {(model, name): task for model, held in holdouts.items() for name, task in held.tasks.items()}
    open_ = [f"{model}, {name} (at least {task.bound:+.4f}, budget {task.budget:g})"
             for (model, name), task in tasks.items() if not task.certified]  # fmt: skip
    numbers = {
        "certified": sum(all(t.certified for t in held.tasks.values()) for held in holdouts.values()),
        "models": len(holdouts),
        "smallest budget certifiable everywhere": max(task.certifiable for task in tasks.values()),
    }
    told = f"not certified: {'; '.join(open_)}" if open_ else f"all {count(len(holdouts), 'model')}"
    return Check("certified", not open_, told, numbers, warning=pool.holdout.quality == "point")


def _bytes_on_disk(proof: SharingProof) -> Check:
    told = (
        f"{size(proof.verified_disk)} of {size(proof.checkpoint_bytes)} saved "
        f"({percent(proof.verified_disk, proof.checkpoint_bytes)}), {size(proof.claimed)} claimed"
    )
    numbers = {
        "bytes of all checkpoints": proof.checkpoint_bytes,
        "bytes claimed": proof.claimed,
        "bytes verified on disk": proof.verified_disk,
        "share verified on disk": proof.verified_disk / proof.checkpoint_bytes,
    }
    return Check("bytes_on_disk", proof.verified_disk == proof.claimed, told, numbers)


def _bytes_in_memory(proof: SharingProof, least: int) -> Check:
    memory = proof.memory
    measured = bool(memory.exports)
    told = (
        f"{size(proof.verified_memory)} saved in {memory.engine} processes, {size(proof.claimed)} claimed, "
        f"at least {size(max(least, 0))} needed"
    )
    numbers: dict[str, Any] = {
        "processes": table(processes_table(proof)),
        "bytes claimed": proof.claimed,
        "bytes needed": max(least, 0),
        "bytes verified in memory": proof.verified_memory,
        "bytes shared by processes": memory.shared,
        "bytes saved by processes": memory.saved,
    }
    passed = measured and min(memory.shared, memory.saved) >= least
    return Check("bytes_in_memory", passed, told if measured else memory.engine, numbers)


def mapping(pool: Pool) -> list[str]:
    """The models whose servers are vLLM with shared tensors mapped."""
    maps = pool.deploy.plugin and pool.deploy.adapters is None
    return [model for model, engine in pool.engines.items() if maps and engine == "vllm"]


def measured_as_deployed(pool: Pool, engines: Mapping[str, Engine]) -> Check:
    """No fingerprint knows where engines lie, so this is said rather than made stale."""
    told = f"memory was measured with {' and '.join(sorted(set(engines.values())))}"
    if any(engines[model] != "vllm" for model in mapping(pool)):
        remedy = f"name the Python of a vLLM with this package by {PYTHON} and materialise sharing_proof again"
        return Check("measured_as_deployed", False, f"{told}, the pool is deployed on vLLM: {remedy}", warning=True)
    return Check("measured_as_deployed", True, told, warning=True)
