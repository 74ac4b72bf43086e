"""The pictures of a pool with their titles, and in words what each shows: the same in the report and in the UI."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure

from sandhi_core.records import HoldoutScore, OperatingPoints, Profile, Savings, SharingProof, Trajectory
from sandhi_core.report import figures, outcome
from sandhi_core.report.data import SlotState
from sandhi_core.words import count, percent, size

OF_ONE_MODEL = "trajectory-"
NAMED_MODELS = 12
"""Up to so many models are told one by one: whoever has a picture read to them should not have to hear a hundred."""


@dataclass(frozen=True)
class Picture:
    """A figure to be drawn; `alt` says in words what it shows, for those who cannot see it."""

    name: str
    title: str
    alt: str
    draw: Callable[[], Figure]


def holdout(holdouts: Mapping[str, HoldoutScore]) -> Picture:
    """How much of its budget each model has used on questions never used before; by model name."""
    used = [f"{m} used {-100 * t.difference / t.budget:.0f} % of its budget for {name}"
            for m, h in holdouts.items() for name, t in h.tasks.items()]  # fmt: skip
    alt = f"Change on the holdout with 95 % intervals, in budgets: {_listed(used)}."
    return Picture("holdout", "Quality on unseen questions", alt, lambda: outcome.holdout_chart(holdouts))


def savings(saved: Savings, proof: SharingProof | None) -> Picture:
    """Bytes before and after; without a proof only what is claimed."""
    share = percent(saved.net, saved.checkpoint_bytes)
    alt = f"Of {size(saved.checkpoint_bytes)} of checkpoints {share} are claimed as saved"
    if proof is not None:
        alt += f", {size(proof.verified_disk)} verified on disk and {size(proof.verified_memory)} in memory"
    return Picture("bytes", "Bytes before and after", alt + ".", lambda: outcome.bytes_chart(saved, proof))


def pareto(points: OperatingPoints) -> Picture:
    """Named operating points: savings against the worst drop."""
    named = [f"{p.name} saves {percent(p.savings.net, p.savings.checkpoint_bytes)} at a worst drop of "
             f"{max(p.drops.values()):.3g}" for p in (*points.points, points.deployed)]  # fmt: skip
    alt = f"Savings against worst drop on the search split: {'; '.join(named)}."
    return Picture("pareto", "Savings against quality", alt, lambda: figures.pareto_chart(points))


def sharing(states: Mapping[str, tuple[SlotState, ...]]) -> Picture:
    """Layer by projection, what became of every slot; by model name."""
    shared = [f"{m} shares {sum(s.state in ('shared', 'duplicate') for s in slots)} of {len(slots)}"
              for m, slots in states.items()]  # fmt: skip
    alt = f"Layer by projection for every model: {_listed(shared)} slots."
    return Picture("sharing", "Who shares what", alt, lambda: outcome.sharing_map(states))


def sensitivity(*profiles: Profile, gate: float) -> Picture:
    """What noise in each component costs; every profile has sensitivities."""
    worst = {p.model: max(p.sensitivities, key=lambda s: s.drop) for p in profiles}
    most = [f"{m} most in layer {s.layer} {s.component} ({s.drop:.3g})" for m, s in worst.items()]
    alt = f"Drop with noise in each layer's attention and MLP: {_listed(most)}."
    return Picture("sensitivity", "Sensitivity to noise", alt, lambda: figures.sensitivity_map(*profiles, gate=gate))


def trajectory(walk: Trajectory, budgets: Mapping[str, float], deployed: int | None = None) -> Picture:
    """One model's steps on the search split; `budgets` by task, `deployed`: how many steps the served weights go."""
    accepted = sum(s.decision == "accepted" for s in walk.steps)
    return Picture(
        f"{OF_ONE_MODEL}{walk.model}",
        f"Trajectory of {walk.model}",
        f"{walk.model}: {accepted} of {count(len(walk.steps), 'step')} accepted on the search split.",
        lambda: figures.trajectory_chart(walk, budgets, deployed),
    )


def _listed(told: list[str]) -> str:
    """Joined; of more than can be listened to, how many there are besides."""
    more = len(told) - NAMED_MODELS
    return "; ".join(told) if more <= 0 else f"{'; '.join(told[:NAMED_MODELS])}; and {more} more"
