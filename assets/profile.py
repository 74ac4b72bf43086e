"""profile[model]: how much each component's weights matter to the model's tasks."""

from typing import Any

from assets.pictures import picture
from assets.stage import Job, Outcome
from assets.tables import table
from sandhi_core.profile import profile
from sandhi_core.records import Profile
from sandhi_core.report import pictures
from sandhi_core.report.stages import sensitive_table


def run(job: Job) -> Outcome:
    pool, entry = job.bench.catalogue.entry(job.key)
    fingerprint = job.bench.fingerprint(entry.name)
    checkpoint = job.bench.checkpoint(entry.name)
    record = profile(entry.name, fingerprint, checkpoint, job.bench.evaluator(pool, entry), pool.profile)
    tolerant = sum(s.drop <= pool.profile.gate for s in record.sensitivities)
    return Outcome(
        record,
        {
            **(_noise(record, pool.profile.gate) if record.sensitivities else {}),
            "components": len(record.sensitivities),
            "within the gate": tolerant,
            **{f"questions {task}": n for task, n in record.questions.items()},
            **{f"baseline {task}": value for task, value in record.baseline.items()},
        },
    )


def _noise(record: Profile, gate: float) -> dict[str, Any]:
    return {
        "sensitivity": picture(pictures.sensitivity(record, gate=gate)),
        "what noise hurts most": table(sensitive_table(record)),
        "largest drop under noise": max(s.drop for s in record.sensitivities),
    }
