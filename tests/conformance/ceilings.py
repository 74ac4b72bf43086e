"""How many bytes a recorded pool could save at most, whatever its models' scores would say to it."""

from collections.abc import Mapping

from sandhi_core.assignment import Assignment
from sandhi_core.grouping.groups import make_groups
from sandhi_core.pools.pool import GroupingSettings, MergingSettings
from sandhi_core.records import Fingerprint, Profile, Savings
from sandhi_core.savings import savings
from tests.conformance.recorded import RecordedModel, RecordedRun


def compatible(run: RecordedRun) -> Savings:
    """If every set of same-layer slots that agree in shape (`wide` candidates) held one tensor."""
    return _all_shared({m.name: m.fingerprint for m in run.models}, run)


def tolerant(run: RecordedRun) -> Savings:
    """The same for slots of components whose noise drop is within the run's gate. Raises ValueError without a
    profile."""
    return _all_shared({m.name: _within_gate(m, run.gate) for m in run.models}, run)


def _within_gate(model: RecordedModel, gate: float) -> Fingerprint:
    if model.profile is None:
        raise ValueError(f"{model.label}: no profile was recorded")
    passed = {(s.component, s.layer) for s in model.profile.sensitivities if s.drop <= gate + 1e-9}
    slots = tuple(s for s in model.fingerprint.slots if (s.component, s.layer) in passed)
    return model.fingerprint.model_copy(update={"slots": slots})


def _all_shared(fingerprints: Mapping[str, Fingerprint], run: RecordedRun) -> Savings:
    profiles = {name: _indifferent(name) for name in fingerprints}
    groups = make_groups("", "", fingerprints, profiles, GroupingSettings(), MergingSettings(), 0.0, None)
    assigned: dict[str, dict[str, str]] = {name: {} for name in fingerprints}
    for group in groups.groups:
        for slot in group.members:
            assigned[slot.model][slot.tensor] = group.recipe.digest
    return savings(
        {m: Assignment(tensors) for m, tensors in assigned.items()}, {m.name: m.fingerprint for m in run.models}
    )


def _indifferent(model: str) -> Profile:
    return Profile(model=model, fingerprint="", seeds=(), questions={}, baseline={}, sensitivities=())
