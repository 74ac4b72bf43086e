"""Other pools in the artifact root that a build of this one would disturb, as far as their records tell.

A model's checkpoint and profile are kept once, whichever pools name it: two that want them otherwise make each other's
stale with every build. What a record was made from stands in its envelope.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from sandhi_core.artifacts import Artifacts
from sandhi_core.errors import Problem
from sandhi_core.evaluation.conditions import conditions
from sandhi_core.pools.pool import ModelEntry, Pool
from sandhi_core.records import Trajectory

_SETTINGS = ("splits", "seed", "dtype", "device", "batch_tokens")  # of the conditions of scoring those of a pool file


def disturbed(pool: Pool, artifacts: Artifacts) -> Iterator[Problem]:
    """A warning for every other pool with records of a model of this one that were made with other settings, and one
    where a pool of this name was built with none of its models. (One that has some in common is this one, edited.)"""
    entries = {entry.name: entry for entry in pool.models}
    members: dict[str, list[str]] = defaultdict(list)
    for key in artifacts.keys("trajectory"):
        name, _, model = key.partition(".")
        members[name].append(model)
    own = members.pop(pool.name, [])
    if own and not entries.keys() & set(own):
        yield _warning(
            "same-name",
            f"a pool of this name was built in this artifact root with other models ({', '.join(own)}): its groups, "
            "operating points and report will be replaced",
            "give one of the two another name or another --root; nothing, if this is that pool with all models changed",
        )
    for name, models in members.items():
        found = {model: _differing(pool, entries[model], name, artifacts) for model in models if model in entries}
        if differing := {model: fields for model, fields in found.items() if fields}:
            fields = sorted(set[str]().union(*differing.values()))
            yield _warning(
                "shared-model",
                f"pool {name} in this artifact root was built with another {', '.join(fields)} of "
                f"{', '.join(differing)}: profiles are kept once for all pools, so each build of one makes the other's "
                "stale",
                "give both the same, or roots of their own; nothing, if the file of that pool was changed alike",
            )


def _differing(pool: Pool, entry: ModelEntry, other: str, artifacts: Artifacts) -> set[str]:
    """The fields of the pool file in which another pool's records of a model differ. Contents of task files and
    versions of packages are no settings: they change for both."""
    walked = artifacts.envelope(("trajectory", f"{other}.{entry.name}"))
    checkpoint, profile = (artifacts.envelope((stage, entry.name)) for stage in ("checkpoint", "profile"))
    fields = set()
    if checkpoint and [checkpoint.own["path"], checkpoint.own["revision"]] != [entry.path, entry.revision]:
        fields.add("path")
    if profile and [profile.own["seeds"], profile.own["noise"]] != [list(pool.profile.seeds), pool.profile.noise]:
        fields.add("profile")
    if walked and "conditions" in walked.own["scoring"]:
        fields |= set(_scored_otherwise(pool, entry, Trajectory.model_validate(walked.record), walked.own["scoring"]))
    return fields


def _scored_otherwise(pool: Pool, entry: ModelEntry, walk: Trajectory, scoring: dict[str, Any]) -> Iterator[str]:
    asked, scored = conditions(pool.evaluation), scoring["conditions"]
    yield from (f"evaluation.{name}" for name in _SETTINGS if asked[name] != scored[name])
    metrics = sorted(metric for _, metric in scoring["tasks"])
    if [sorted(walk.baseline), metrics] != [sorted(t.task for t in entry.tasks), sorted(t.metric for t in entry.tasks)]:
        yield "tasks"


def _warning(code: str, message: str, remedy: str) -> Problem:
    return Problem(code=code, severity="warning", message=message, remedy=remedy)
