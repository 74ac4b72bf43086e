"""checkpoint[model]: what the files hold, tensor by tensor, once everything about them has been checked."""

from assets.stage import Job, Outcome, StageAsset
from sandhi_core.errors import PreflightError
from sandhi_core.preflight import check_model


def run(job: Job) -> Outcome:
    _, entry = job.bench.catalogue.entry(job.key)
    problems, fingerprint = check_model(entry, job.bench.scans)
    for problem in problems:
        job.log(problem.line())
    if fingerprint is None:
        raise PreflightError(problems)
    return Outcome(
        fingerprint,
        {
            "tensors": len(fingerprint.tensors),
            "bytes": fingerprint.nbytes,
            "slots": len(fingerprint.slots),
            "warnings": len(problems),
            "model_type": fingerprint.model_type,
        },
    )


STAGE = StageAsset(
    name="checkpoint",
    description="Fingerprint of a model's checkpoint: digest and statistics of every tensor, digest of every file.",
    run=run,
    kinds=frozenset({"safetensors"}),
)
