"""profile[model]: how much each component's weights matter to the model's tasks."""

from assets.pictures import picture
from assets.stage import Job, Outcome, StageAsset
from sandhi_core.profile import profile
from sandhi_core.report.figures import sensitivity_map


def run(job: Job) -> Outcome:
    pool, entry = job.bench.catalogue.entry(job.key)
    fingerprint = job.bench.fingerprint(entry.name)
    checkpoint = job.bench.checkpoint(entry.name)
    record = profile(entry.name, fingerprint, checkpoint, job.bench.evaluator(pool, entry), pool.profile)
    tolerant = sum(s.drop <= pool.profile.gate for s in record.sensitivities)
    return Outcome(
        record,
        {
            **({"sensitivity": picture(sensitivity_map(record))} if record.sensitivities else {}),
            "components": len(record.sensitivities),
            "within the gate": tolerant,
            **{f"baseline {task}": value for task, value in record.baseline.items()},
        },
    )


STAGE = StageAsset(
    name="profile",
    description="Baseline, and the score with noise in each layer's attention or MLP, on the profile split.",
    run=run,
    scores=True,
    kinds=frozenset({"pytorch"}),
)
