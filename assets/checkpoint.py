"""checkpoint[model]: what the files hold, tensor by tensor, once everything about them has been checked."""

import dagster as dg

from assets.stage import Job, Outcome
from assets.tables import table
from sandhi_core.checkpoints.checkpoint import resolve
from sandhi_core.errors import PreflightError
from sandhi_core.preflight.checks import check_model
from sandhi_core.report.stages import parts_table


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
            "what the bytes are": table(parts_table(fingerprint)),
            "directory": dg.MetadataValue.path(str(resolve(entry))),
            "tensors": len(fingerprint.tensors),
            "bytes": fingerprint.nbytes,
            "slots": len(fingerprint.slots),
            "layers": fingerprint.layers,
            "warnings": len(problems),
            "model type": fingerprint.model_type,
            "dtype": fingerprint.dtype,
        },
    )
