"""sharing_proof[pool]: exported bytes are the scored bytes, held once on disk and in memory; each measured."""

from pathlib import Path

from assets.stage import Check, Job, Outcome, StageAsset
from sandhi_core.cutoffs import tensors_at
from sandhi_core.evaluation.evaluator import score_directory
from sandhi_core.records import (
    Evaluation,
    MergedWeights,
    OperatingPoints,
    TaskResult,
    Trajectory,
)
from sandhi_core.sharing import prove


def run(job: Job) -> Outcome:
    bench = job.bench
    pool = bench.catalogue.pools[job.key]
    entries = {entry.name: entry for entry in pool.models}

    def answers(model: str, directory: Path) -> dict[str, TaskResult]:
        return score_directory(directory, entries[model], pool.evaluation, "holdout", bench.datasets)

    trajectories = bench.of_pool(Trajectory, "trajectory", job.key)
    deployed = bench.artifacts.load(OperatingPoints, "operating_points", job.key).deployed
    record = prove(
        bench.artifacts.load(MergedWeights, "merged_weights", job.key),
        bench.artifacts.root,
        bench.checkpoints(job.key),
        bench.fingerprints(job.key),
        {m: tensors_at(trajectories[m], steps) for m, steps in deployed.cutoffs.items()},
        deployed.savings,
        {m: _scored(job, m, holdout.weights) for m, holdout in bench.deployed_holdouts(job.key).items()},
        answers,
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
        },
        (
            Check(
                "exported_is_scored",
                record.passed,
                "; ".join(record.problems) or "every digest and answer equal",
            ),
        ),
    )


def _scored(job: Job, model: str, weights: str) -> Evaluation:
    """What the holdout's walk recorded for the weights that are deployed."""
    pool, entry = job.bench.catalogue.entry(f"{job.key}.{model}")
    return job.bench.evaluator(pool, entry).recorded("holdout", weights)


STAGE = StageAsset(
    name="sharing_proof",
    description="Every exported tensor re-read and compared with what was scored; bytes shared, on disk and in memory.",
    run=run,
    checks=("exported_is_scored",),
    scores=True,
    kinds=frozenset({"safetensors"}),
)
