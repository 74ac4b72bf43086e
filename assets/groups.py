"""groups[pool.group]: which slots are proposed to share one tensor, by what recipe, and why the others are not."""

import time
from collections import Counter
from functools import cache, partial

from assets.stage import Job, Outcome
from assets.tables import table
from sandhi_core.checkpoints.scan import row_statistics
from sandhi_core.errors import CheckpointError, StoreError
from sandhi_core.graph import evidence_rule
from sandhi_core.grouping.besides import besides
from sandhi_core.grouping.groups import make_groups
from sandhi_core.grouping.kinship import families
from sandhi_core.grouping.methods import Measures
from sandhi_core.grouping.reform import Makers, as_before, who_took
from sandhi_core.layout import read_manifest
from sandhi_core.merging import squared_distance
from sandhi_core.offers import TOLD_EVERY, Offers
from sandhi_core.recipes import recipe_key
from sandhi_core.records import Groups, Profile, Recipe, Slot, digest_of
from sandhi_core.report.stages import groups_table, left_out_table
from sandhi_core.rungs.allotment import Candidate
from sandhi_core.rungs.choice import Evidence


def run(job: Job) -> Outcome:
    catalogue, artifacts = job.bench.catalogue, job.bench.artifacts
    pool = catalogue.pools[job.pool]
    if missing := catalogue.unreadable(pool.name):
        raise CheckpointError(
            "cannot be read, so that its group would be formed without it",
            model=missing[0],
            remedy="make its checkpoint readable, or take it out of the pool file",
        )
    models = catalogue.members(job.key)
    grouping = pool.grouping
    makers = _makers(job)
    earlier = None if job.regroup and makers is None else _earlier(job)
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
        None if pool.merging.plain else _measures(job),
        makers,
    )
    methods = Counter(g.recipe.method for g in record.groups)
    reasons = Counter(e.reason for e in record.excluded)
    return Outcome(
        record,
        {
            "proposed groups": table(groups_table(record)),
            "slots in no group": table(left_out_table(record)),
            "models": ", ".join(models),
            "groups": len(record.groups),
            "methods": ", ".join(f"{n} {method}" for method, n in methods.most_common()) or "none",
            "slots in groups": sum(len(g.members) for g in record.groups),
            "slots left out": len(record.excluded),
            "why": "; ".join(f"{n} {reason}" for reason, n in reasons.most_common()) or "none left out",
        },
    )


def _earlier(job: Job) -> Groups | None:
    """The groups as they were: models that joined do not change what the others share."""
    artifacts, node = job.bench.artifacts, ("groups", job.key)
    if not job.regroup and (damaged := artifacts.damaged(node)) is not None:
        raise StoreError(
            "is damaged: it says who joined these groups; formed anew they may share other tensors",
            file=str(damaged),
            remedy="restore it from a backup; or `sandhi build --regroup` forms them anew and searches all models",
        )
    return None if artifacts.envelope(node) is None else artifacts.load(Groups, *node)


def _makers(job: Job) -> Makers | None:
    """Who makes averages where groups are formed from scratch: at a regrouping those who are served them."""
    pool = job.bench.catalogue.pools[job.pool]
    if pool.grouping.on_regroup == "fresh":
        return None
    if not job.regroup:
        return None if pool.grouping.on_new_model == "join" else as_before
    deployed = job.bench.artifacts.deployed(pool.name)
    if deployed is None:
        return as_before
    models = read_manifest(deployed.parent).models
    served = {(m, name): t.digest for m, model in models.items() for name, t in model.tensors.items()}
    return who_took(served, lambda recipe: job.bench.store.recipe_tensor(recipe_key(recipe)))


def _measures(job: Job) -> Measures:
    """What the pool's methods ask for; models are loaded, one at a time, only where a group needs moments that are not
    there yet."""
    bench, pool = job.bench, job.bench.catalogue.pools[job.pool]
    decomposed, told = 0, time.monotonic()

    @cache
    def offers(model: str) -> Offers:
        bench.inputs(model).ready(importance=pool.search.errors == "answers")
        return bench.offers(*bench.catalogue.entry(f"{pool.name}.{model}"))

    def candidate(slot: Slot, recipe: Recipe) -> Candidate:
        nonlocal decomposed, told
        found = offers(slot.model).candidate(slot.tensor, recipe)
        if pool.search.strategy == "walk":  # which adds no residuals
            offers(slot.model).shorten(slot.tensor, recipe)
        decomposed += 1
        if time.monotonic() - told > TOLD_EVERY:
            told = time.monotonic()
            job.log(f"{decomposed} matrices decomposed to compare methods")
        return found

    def distance(one: Slot, other: Slot) -> float:
        matrices = (bench.opened(pool, slot.model)[0].tensor(slot.tensor) for slot in (one, other))
        return squared_distance(*matrices)

    return Measures(
        {base.name: bench.base(base)[1] for base in pool.bases},
        distance,
        lambda model: bench.inputs(model).key,
        Evidence(
            candidate,
            lambda slot, recipe: offers(slot.model).shorten(slot.tensor, recipe),
            own=pool.deploy.adapters is None,
            rule=digest_of(evidence_rule(pool)),
        ),
    )
