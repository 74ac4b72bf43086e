"""sharing_proof[pool]: exported bytes are the scored bytes, held once on disk and in memory; each measured."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from assets.stage import Check, Job, Outcome, StageAsset
from sandhi_core.assignment import Assignment, assignment_at
from sandhi_core.cutoffs import EPSILON
from sandhi_core.evaluation.evaluator import merged_weights, score_directory
from sandhi_core.layout import DEPLOYMENT
from sandhi_core.pool import Engine, Pool
from sandhi_core.records import (
    Evaluation,
    MergedWeights,
    OperatingPoints,
    TaskResult,
    Trajectory,
)
from sandhi_core.serving.engines import PYTHON, python_of
from sandhi_core.serving.measure import compare
from sandhi_core.sharing import prove


def run(job: Job) -> Outcome:
    bench = job.bench
    pool = bench.catalogue.pools[job.key]
    entries = {entry.name: entry for entry in pool.models}

    def answers(model: str, directory: Path) -> dict[str, TaskResult]:
        return score_directory(directory, entries[model], pool.evaluation, "holdout", bench.datasets)

    trajectories = bench.of_pool(Trajectory, "trajectory", job.key)
    deployed = bench.artifacts.load(OperatingPoints, "operating_points", job.key).deployed
    assignments = {m: assignment_at(trajectories[m], steps) for m, steps in deployed.cutoffs.items()}
    merged = bench.artifacts.load(MergedWeights, "merged_weights", job.key)
    engines, python = proving(pool)
    # What was deployed before must not outlive a proof that fails now.
    (bench.artifacts.root / merged.export / DEPLOYMENT).unlink(missing_ok=True)
    record = prove(
        merged,
        bench.artifacts.root,
        bench.checkpoints(job.key),
        bench.fingerprints(job.key),
        assignments,
        deployed.savings,
        {m: _scored(job, m, held) for m, held in assignments.items()},
        answers,
        partial(compare, engine=engines, python=python),
    )
    questions = sum(record.questions_checked.values())
    return Outcome(
        record,
        {
            "bytes of all checkpoints": record.checkpoint_bytes,
            "bytes of exact duplicates": record.duplicates,
            "bytes claimed": record.claimed,
            "bytes verified on disk": record.verified_disk,
            "bytes verified in memory": record.verified_memory,
            "questions compared": questions,
            "memory measured with": record.memory.engine,
        },
        (
            Check(
                "exported_is_scored",
                record.passed,
                "; ".join(record.problems) or "every digest and answer equal, every claimed byte saved",
            ),
            _within_budgets(job),
            _measured_as_deployed(pool, engines),
        ),
    )


def proving(pool: Pool) -> tuple[dict[str, Engine], str]:
    """What the memory of a pool's export is proved with, by model, and vLLM's Python: the engine that a model is
    deployed on where that maps shared tensors and this machine says by the environment variable where it is, else
    transformers. The record of the proof says which it was: what one engine shares is no claim for another."""
    python = os.environ.get(PYTHON, "")
    mapping = _mapping(pool)
    if not (mapping and python):
        return dict.fromkeys(pool.engines, "transformers"), ""
    return {model: "vllm" if model in mapping else "transformers" for model in pool.engines}, python_of("vllm", python)


def _mapping(pool: Pool) -> list[str]:
    """The models whose servers are vLLM with shared tensors mapped."""
    maps = pool.deploy.plugin and pool.deploy.adapters is None
    return [model for model, engine in pool.engines.items() if maps and engine == "vllm"]


def _measured_as_deployed(pool: Pool, engines: Mapping[str, Engine]) -> Check:
    """No fingerprint knows where engines lie, so this is said rather than made stale."""
    told = f"memory was measured with {' and '.join(sorted(set(engines.values())))}"
    if any(engines[model] != "vllm" for model in _mapping(pool)):
        remedy = f"name the Python of a vLLM with this package by {PYTHON} and materialise sharing_proof again"
        return Check("measured_as_deployed", False, f"{told}, the pool is deployed on vLLM: {remedy}", warning=True)
    return Check("measured_as_deployed", True, told, warning=True)


def _scored(job: Job, model: str, assignment: Assignment) -> Evaluation:
    """What the holdout's walk gave the deployed weights; scored again only where the score log was lost."""
    pool, entry = job.bench.catalogue.entry(f"{job.key}.{model}")
    job.bench.restore(f"{job.key}.{model}", assignment)
    weights = merged_weights(job.bench.fingerprint(model), assignment, job.bench.store)
    return job.bench.evaluator(pool, entry).evaluate("holdout", weights)


def _within_budgets(job: Job) -> Check:
    """Every model's deployed weights against the budgets that the pool file has now."""
    pool, holdouts = job.bench.catalogue.pools[job.key], job.bench.deployed_holdouts(job.key)
    shown = {
        (entry.name, task): found.bound if pool.holdout.quality == "certified" else found.difference
        for entry in pool.models
        for task, found in holdouts[entry.name].tasks.items()
    }
    over = [
        f"{entry.name}, {task.task}: {shown[entry.name, task.task]:+.4f}, budget {task.budget}"
        for entry in pool.models
        for task in entry.tasks
        if -shown[entry.name, task.task] > task.budget + EPSILON
    ]
    how = "with 95 % confidence, " if pool.holdout.quality == "certified" else ""
    return Check("within_budget", not over, "; ".join(over) or f"every model, {how}on questions never used before")


STAGE = StageAsset(
    name="sharing_proof",
    description="Every exported tensor re-read and compared with what was scored; bytes shared, on disk and in memory.",
    run=run,
    checks=("exported_is_scored", "within_budget", "measured_as_deployed"),
    scores=True,
    kinds=frozenset({"safetensors"}),
)
