"""What a report is made from, and what follows from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sandhi_core.assignment import Assignment, assignment_at
from sandhi_core.deploy.spec import DeploymentSpec
from sandhi_core.graph import Node
from sandhi_core.pools.pool import Pool
from sandhi_core.records import (
    Adjustment,
    CutoffSet,
    Fingerprint,
    Groups,
    HoldoutScore,
    Manifest,
    OperatingPoint,
    OperatingPoints,
    Plan,
    Profile,
    SharingProof,
    Slot,
    Trajectory,
)
from sandhi_core.savings import PAGE_ALIGNED, Holding, holdings


@dataclass(frozen=True)
class ReportData:
    """A pool's records: `groups` by group key, all other mappings by model name. What is missing is reported
    as not measured, so a pool can be looked at while it is being built. `never`, `stale` and `waiting` (for these) are
    the nodes whose records are not what a build would leave."""

    pool: Pool
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    groups: Mapping[str, Groups] = field(default_factory=dict)
    plans: Mapping[str, Plan] = field(default_factory=dict)
    trajectories: Mapping[str, Trajectory] = field(default_factory=dict)
    cutoffs: Mapping[str, CutoffSet] = field(default_factory=dict)
    holdouts: Mapping[str, HoldoutScore] = field(default_factory=dict)
    points: OperatingPoints | None = None
    manifest: Manifest | None = None
    proof: SharingProof | None = None
    deployment: DeploymentSpec | None = None
    never: tuple[Node, ...] = ()
    stale: tuple[Node, ...] = ()
    waiting: tuple[Node, ...] = ()

    @property
    def gate(self) -> float:
        return self.pool.profile.gate

    @property
    def budgets(self) -> dict[str, dict[str, float]]:
        """Model to task to budget."""
        return {model.name: {t.task: t.budget for t in model.tasks} for model in self.pool.models}

    @property
    def complete(self) -> bool:
        """Whether every model of the pool has been held to questions never used before."""
        return all(model.name in self.holdouts for model in self.pool.models)


State = Literal["shared", "duplicate", "alone", "kept", "excluded"]
"""What became of a slot: it holds a merged tensor that others hold too; it was byte-identical to another's
from the start; it holds a merged tensor that nobody else kept; it was proposed and stayed as it was; it was
never proposed."""


@dataclass(frozen=True)
class SlotState:
    """One projection of one model at an operating point. `holders` are all models with this very tensor;
    `adjustment`: the residual, or vectors of the rows, that this one adds to it."""

    slot: Slot
    state: State
    digest: str
    holders: tuple[str, ...]
    adjustment: Adjustment | None = None

    @property
    def added(self) -> bool:
        return self.adjustment is not None


def slot_states(
    fingerprints: Mapping[str, Fingerprint],
    plans: Mapping[str, Plan],
    trajectories: Mapping[str, Trajectory],
    point: OperatingPoint,
    alignment: int = PAGE_ALIGNED,
) -> dict[str, tuple[SlotState, ...]]:
    """What became of every slot at `point`, in files of this `alignment` in bytes; by model name, in the order of the
    fingerprint's slots."""
    assigned = _assigned(trajectories, point)
    held = {(h.name, h.digest): h for h in holdings(assigned, fingerprints, alignment)}

    def state_of(slot: Slot, own: Assignment, planned: set[str]) -> SlotState:
        digest = own.tensors.get(slot.tensor, slot.digest)
        holding = held[slot.tensor, digest]
        state: State
        if holding.shared:
            state = "shared" if holding.merged else "duplicate"
        elif slot.tensor in own.tensors:
            state = "alone"
        else:
            state = "kept" if slot.tensor in planned else "excluded"
        return SlotState(slot, state, digest, holding.models, own.adjustments.get(slot.tensor))

    return {
        name: tuple(state_of(s, assigned.get(name, Assignment()), _planned(plans.get(name))) for s in fingerprint.slots)
        for name, fingerprint in fingerprints.items()
    }


def shared_holdings(
    fingerprints: Mapping[str, Fingerprint],
    trajectories: Mapping[str, Trajectory],
    point: OperatingPoint,
    alignment: int = PAGE_ALIGNED,
) -> tuple[Holding, ...]:
    """Every tensor that several models hold at `point`, projections and all others, in files of this `alignment`."""
    return tuple(h for h in holdings(_assigned(trajectories, point), fingerprints, alignment) if h.shared)


def _assigned(trajectories: Mapping[str, Trajectory], point: OperatingPoint) -> dict[str, Assignment]:
    return {m: assignment_at(t, point.cutoffs[m]) for m, t in trajectories.items() if m in point.cutoffs}


def _planned(plan: Plan | None) -> set[str]:
    return {merge.tensor for step in plan.steps for merge in step.merges} if plan else set()
