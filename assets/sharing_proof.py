"""sharing_proof[pool]: exported bytes are the scored bytes, held once on disk and in memory; each measured."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from assets.pictures import picture
from assets.stage import Job, Outcome
from assets.tables import table
from assets.verdicts import mapping, verdicts
from sandhi_core.assignment import Assignment, assignment_at
from sandhi_core.claims import least_in_memory
from sandhi_core.evaluation.evaluator import merged_weights, score_directory
from sandhi_core.files import writing
from sandhi_core.layout import DEPLOYMENT, read_manifest
from sandhi_core.pools.pool import Engine, Pool
from sandhi_core.records import (
    Evaluation,
    HoldoutScore,
    MergedWeights,
    OperatingPoint,
    OperatingPoints,
    SharingProof,
    TaskResult,
    Trajectory,
)
from sandhi_core.report import pictures
from sandhi_core.report.stages import processes_table
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
    if (
        not record.passed
    ):  # what was deployed from these files must not outlive it; a proof under way takes nothing away
        deployment = bench.artifacts.root / merged.export / DEPLOYMENT
        with writing(deployment):
            deployment.unlink(missing_ok=True)
    holdouts = bench.deployed_holdouts(job.key)
    least = least_in_memory(record.claimed, read_manifest(bench.artifacts.root / merged.export))
    found = verdicts(pool, record, least, holdouts, engines)
    return Outcome(record, _metadata(pool, record, deployed, holdouts), found)


def _metadata(
    pool: Pool, record: SharingProof, deployed: OperatingPoint, holdouts: Mapping[str, HoldoutScore]
) -> dict[str, Any]:
    return {
        "bytes before and after": picture(pictures.savings(deployed.savings, record)),
        "quality": picture(pictures.holdout(holdouts)),
        "processes": table(processes_table(record)),
        "bytes of all checkpoints": record.checkpoint_bytes,
        "bytes of exact duplicates": record.duplicates,
        "bytes claimed": record.claimed,
        "bytes verified on disk": record.verified_disk,
        "bytes verified in memory": record.verified_memory,
        "share verified on disk": record.verified_disk / record.checkpoint_bytes,
        "share verified in memory": record.verified_memory / record.checkpoint_bytes,
        "questions compared": sum(record.questions_checked.values()),
        "memory measured with": record.memory.engine,
    }


def proving(pool: Pool) -> tuple[dict[str, Engine], str]:
    """What the memory of a pool's export is proved with, by model, and vLLM's Python: the engine that a model is
    deployed on where that maps shared tensors and this machine says by the environment variable where it is, else
    transformers. The record of the proof says which it was: what one engine shares is no claim for another."""
    python = os.environ.get(PYTHON, "")
    mapped = mapping(pool)
    if not (mapped and python):
        return dict.fromkeys(pool.engines, "transformers"), ""
    return {model: "vllm" if model in mapped else "transformers" for model in pool.engines}, python_of("vllm", python)


def _scored(job: Job, model: str, assignment: Assignment) -> Evaluation:
    """What the holdout's walk gave the deployed weights; scored again only where the score log was lost."""
    pool, entry = job.bench.catalogue.entry(f"{job.key}.{model}")
    job.bench.restore(f"{job.key}.{model}", assignment)
    weights = merged_weights(job.bench.fingerprint(model), assignment, job.bench.store)
    return job.bench.evaluator(pool, entry).evaluate("holdout", weights)
