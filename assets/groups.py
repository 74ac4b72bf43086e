"""groups[pool.group]: which slots are proposed to share one tensor, and why the others are not."""

from collections import Counter
from functools import partial

from assets.stage import Job, Outcome, StageAsset
from sandhi_core.besides import besides
from sandhi_core.grouping import make_groups
from sandhi_core.kinship import families
from sandhi_core.records import Groups, Profile
from sandhi_core.scan import row_statistics


def run(job: Job) -> Outcome:
    catalogue, artifacts = job.bench.catalogue, job.bench.artifacts
    pool = catalogue.pools[job.pool]
    models = catalogue.members(job.key)
    grouping = pool.grouping
    earlier = None
    if not job.regroup and artifacts.envelope(("groups", job.key)) is not None:
        earlier = artifacts.load(Groups, "groups", job.key)
    fingerprints = {m: job.bench.fingerprint(m) for m in models}
    related = families(fingerprints, partial(row_statistics, job.bench.scans)) if grouping.candidates == "wide" else {}
    beside = {m: besides(job.bench.checkpoint(m), fingerprints[m], grouping.besides) for m in models}
    record = make_groups(
        pool.name,
        job.key,
        fingerprints,
        {m: artifacts.load(Profile, "profile", m) for m in models},
        grouping,
        pool.merging,
        pool.profile.gate,
        earlier,
        related,
        beside,
    )
    reasons = Counter(e.reason for e in record.excluded)
    return Outcome(
        record,
        {
            "models": ", ".join(models),
            "groups": len(record.groups),
            "slots in groups": sum(len(g.members) for g in record.groups),
            "slots left out": len(record.excluded),
            "why": "; ".join(f"{n} {reason}" for reason, n in reasons.most_common()) or "none left out",
        },
    )


STAGE = StageAsset(
    name="groups",
    description="Groups of slots that may share one tensor, with the recipe of that tensor, in search order.",
    run=run,
    kinds=frozenset({"scipy"}),
)
