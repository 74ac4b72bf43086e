from collections.abc import Collection, Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandhi_core.assignment import Assignment, assignment_at
from sandhi_core.cutoffs import EPSILON
from sandhi_core.operating_points import operating_points
from sandhi_core.pools.pool import ModelEntry, Pool, TaskBudget
from sandhi_core.records import (
    Adjustment,
    Fingerprint,
    HoldoutScore,
    OperatingPoints,
    Trajectory,
)
from sandhi_core.savings import holdings, savings
from tests.conformance.points import sweep
from tests.synthetic import fingerprint, holdout
from tests.walks import cutoffs, trajectory, walks

NONE: Mapping[int, Collection[str]] = {}


def points(
    walks: dict[str, Trajectory],
    budgets: dict[str, float],
    holdouts: dict[str, HoldoutScore],
    fingerprints: dict[str, Fingerprint] | None = None,
    earlier: OperatingPoints | None = None,
) -> OperatingPoints:
    tasks = {m: (TaskBudget(task="task", metric="acc", budget=budget),) for m, budget in budgets.items()}
    entries = tuple(ModelEntry(name=m, path=f"/models/{m}", tasks=tasks[m]) for m in walks)
    return operating_points(
        Pool(name="pool", models=entries),
        {m: cutoffs(w, budgets[m]) for m, w in walks.items()},
        walks,
        fingerprints or prints(walks),
        holdouts,
        earlier=earlier,
    )


def prints(walks: Iterable[str], duplicates: Mapping[int, Collection[str]] = NONE) -> dict[str, Fingerprint]:
    """Models with their own bytes, but up matrices of `duplicates`: layer to models that have the same there."""
    common = {m: {(n, "up"): f"same-{n}" for n, who in duplicates.items() if m in who} for m in walks}
    return {m: fingerprint(m, 12, bytes_of=common[m]) for m in walks}


def looks(walk: Trajectory, upto: int) -> HoldoutScore:
    """Every cutoff of a walk up to `upto` held."""
    return holdout(walk.model, [c.steps for c in cutoffs(walk, 1.0).cutoffs if 0 < c.steps <= upto])


def test_operating_points() -> None:
    walks = {
        "a": trajectory("a", [0.9, 0.895, 0.885, 0.885]),
        "b": trajectory("b", [0.9, 0.889]),
        "c": trajectory("c", [0.88, None, 0.895, 0.86]),
    }
    held = {m: looks(walks[m], n) for m, n in {"a": 2, "b": 1, "c": 3}.items()}
    found = points(walks, {"a": 0.02, "b": 0.005, "c": 0.05}, held)
    named = {p.name: p for p in found.points}
    assert list(named) == ["A", "B", "Bpm", "C", "Cpm", "Kpm", "pool"]
    assert named["A"].cutoffs == {"a": 0, "b": 0, "c": 0} and named["A"].savings.net == 0
    # b is over one point at its second step and c at its first, so no common cutoff but none.
    assert named["B"].cutoffs == {"a": 0, "b": 0, "c": 0}
    assert named["Bpm"].cutoffs == {"a": 2, "b": 1, "c": 3}
    # At 4 the third model has lost four points; at 3 the second one's walk is over.
    assert named["C"].cutoffs == {"a": 3, "b": 2, "c": 3}
    assert named["Cpm"].cutoffs == {"a": 4, "b": 2, "c": 3}
    assert named["pool"].cutoffs == {"a": 4, "b": 1, "c": 4}
    # All hold shared-0, two hold shared-1, and so on: bytes of one up matrix each.
    saved = {n: p.savings.net // 12288 for n, p in named.items()}
    assert saved["Bpm"] == 2 + 1 and saved["C"] == 2 + 2 + 1 and saved["Cpm"] == 2 + 2 + 1
    assert saved["pool"] == 2 + 1 + 1 + 1
    assert named["Kpm"].savings.net <= named["Cpm"].savings.net
    assert named["C"].drops == pytest.approx({"a": 0.015, "b": 0.011, "c": 0.005})
    assert found.deployed.cutoffs == {"a": 2, "b": 1, "c": 3}
    assert found.deployed.savings == named["Bpm"].savings
    assert named["Kpm"].cutoffs == named["Bpm"].cutoffs  # the second point of drop buys less than the first
    assert found.frontier == ("A", "B", "Bpm", "C", "Cpm", "Kpm")


@settings(max_examples=25)
@given(st.dictionaries(st.sampled_from("abc"), walks, min_size=1))
def test_points_keep_every_model_within_their_budget(scores: dict[str, list[float | None]]) -> None:
    walks = {m: trajectory(m, s) for m, s in scores.items()}
    found = points(walks, dict.fromkeys(walks, 0.03), {m: looks(w, 0) for m, w in walks.items()})
    named = {p.name: p for p in found.points}
    limits = {"A": 0.0, "B": 0.01, "Bpm": 0.01, "C": 0.02, "Cpm": 0.02, "Kpm": 0.02, "pool": 0.03}
    for point, limit in limits.items():
        assert max(named[point].drops.values()) <= limit + EPSILON
        assert all(named[point].cutoffs[m] <= named["pool"].cutoffs[m] for m in walks)
    assert "A" in found.frontier or any(max(p.drops.values()) < 0 or p.savings.net > 0 for p in found.points)


# --- the deployed point -------------------------------------------------------------------------------------


def deployed(walks: dict[str, Trajectory], duplicates: Mapping[int, Collection[str]] = NONE) -> dict[str, int]:
    """The deployed cutoffs where every scored cutoff held on the holdout."""
    held = {m: looks(w, len(w.steps)) for m, w in walks.items()}
    return points(walks, dict.fromkeys(walks, 0.02), held, prints(walks, duplicates)).deployed.cutoffs


def test_a_model_goes_no_further_than_others_follow() -> None:
    walks = {"a": trajectory("a", [0.9] * 5), "b": trajectory("b", [0.9] * 3), "c": trajectory("c", [0.9])}
    assert deployed(walks) == {"a": 3, "b": 3, "c": 1}


def test_a_model_whose_merged_tensors_nobody_else_accepts_stays_as_it_was() -> None:
    walks = {
        "a": trajectory("a", [0.9, 0.9]),
        "b": trajectory("b", [0.9, 0.9]),
        "c": trajectory("c", [0.1, 0.1, 0.9], frozenset({0, 1})),
    }
    assert deployed(walks) == {"a": 2, "b": 2, "c": 0}
    assert deployed({"c": walks["c"]}) == {"c": 0}


def test_only_a_cutoff_that_held_is_gone_back_to() -> None:
    walks = {"a": trajectory("a", [0.9] * 5), "b": trajectory("b", [0.9] * 2)}
    held = {"a": holdout("a", [1, 4, 5]), "b": holdout("b", [2])}
    found = points(walks, dict.fromkeys(walks, 0.02), held)
    assert found.deployed.cutoffs == {"a": 4, "b": 2}  # 2 and 3 would save as much, but nobody looked
    failed = points(walks, dict.fromkeys(walks, 0.02), held | {"b": holdout("b", [], [2])})
    assert failed.deployed.cutoffs == {"a": 0, "b": 0} and failed.deployed.savings.net == 0


def test_bytes_that_were_the_same_from_the_start_are_worth_more_than_a_merged_tensor_for_one() -> None:
    """c goes back to what it has in common with b at no loss, which leaves a alone: it takes a second round."""
    walks = {
        "a": trajectory("a", [0.9]),
        "b": trajectory("b", [0.1], frozenset({0})),
        "c": trajectory("c", [0.9]),
    }
    assert deployed(walks) == {"a": 1, "b": 0, "c": 1}
    assert deployed(walks, {0: "bc"}) == {"a": 0, "b": 0, "c": 0}


def test_a_shallower_cutoff_that_saves_more_is_taken() -> None:
    walks = {"a": trajectory("a", [0.9, 0.9]), "b": trajectory("b", [0.9, 0.1], frozenset({1}))}
    assert deployed(walks, {1: "ab"}) == {"a": 1, "b": 1}


def test_who_joins_moves_nobody() -> None:
    """c follows a further than b did, so that another cutoff of a would save more; a stays where it is served."""
    walks = {"a": trajectory("a", [0.9] * 5), "b": trajectory("b", [0.9] * 3), "c": trajectory("c", [0.9] * 4)}
    budgets, held = dict.fromkeys(walks, 0.02), {m: looks(w, len(w.steps)) for m, w in walks.items()}

    def built(models: str, earlier: OperatingPoints | None = None, **changed: HoldoutScore) -> OperatingPoints:
        now = {m: held[m] for m in models} | changed
        return points({m: walks[m] for m in models}, budgets, now, earlier=earlier)

    pair = built("ab")
    assert pair.deployed.cutoffs == {"a": 3, "b": 3}
    joined = built("abc", pair)
    assert joined.deployed.cutoffs == {"a": 3, "b": 3, "c": 3}
    assert built("abc", joined) == joined
    assert built("abc").deployed.cutoffs == {"a": 4, "b": 3, "c": 4}
    assert built("abc", pair, b=holdout("b", [1])).deployed.cutoffs == {"a": 4, "b": 1, "c": 4}  # b has changed
    assert built("ac", joined) == built("ac")  # b is gone
    assert built("abc", joined.model_copy(update={"alignment": 2 << 20})) == built("abc")  # files had another alignment


@st.composite
def built_pools(draw: st.DrawFn) -> tuple[dict[str, Trajectory], dict[str, HoldoutScore], dict[int, set[str]]]:
    """Walks of which some steps were rejected, how far each held, and up matrices that were the same before."""
    walked, held = {}, {}
    for model in draw(st.permutations("abcd")):
        steps = draw(st.lists(st.sampled_from(["scored", "unscored", "rejected"]), max_size=6))
        rejected = frozenset(i for i, step in enumerate(steps) if step == "rejected")
        walked[model] = trajectory(model, [None if step == "unscored" else 0.9 for step in steps], rejected)
        held[model] = looks(walked[model], draw(st.integers(0, len(steps))))
    duplicates = draw(st.dictionaries(st.integers(0, 5), st.sets(st.sampled_from("abcd"), min_size=2), max_size=3))
    return walked, held, duplicates


@given(built_pools())
def test_no_quality_is_spent_for_nothing(
    built: tuple[dict[str, Trajectory], dict[str, HoldoutScore], dict[int, set[str]]],
) -> None:
    walked, held, duplicates = built
    fingerprints = prints(walked, duplicates)

    def assigned(steps: Mapping[str, int]) -> dict[str, Assignment]:
        return {m: assignment_at(w, steps[m]) for m, w in walked.items()}

    def net(steps: Mapping[str, int]) -> int:
        return savings(assigned(steps), fingerprints).net

    point = points(walked, dict.fromkeys(walked, 0.02), held, fingerprints).deployed
    boldest = {m: h.steps for m, h in held.items()}
    assert all(point.cutoffs[m] in h.held and point.cutoffs[m] <= h.steps for m, h in held.items())
    assert point.savings.net == net(point.cutoffs) >= net(boldest)
    if not duplicates:
        assert point.savings.net == net(boldest)
    shared = {m for h in holdings(assigned(point.cutoffs), fingerprints) if len(h.models) > 1 for m in h.merged}
    assert all(steps == 0 for m, steps in point.cutoffs.items() if m not in shared)
    for model, steps in point.cutoffs.items():
        shallower = [n for n in held[model].held if n < steps]
        assert all(net({**point.cutoffs, model: n}) < point.savings.net for n in shallower)
    again = points(dict(sorted(walked.items())), dict.fromkeys(walked, 0.02), held, fingerprints).deployed
    assert again == point


# --- what residuals cost -------------------------------------------------------------------------------------


def _adding(walk: Trajectory, nbytes: int) -> Trajectory:
    added = Adjustment(kind="low_rank", nbytes=nbytes)
    steps = tuple(s.model_copy(update={"adjustments": dict.fromkeys(s.tensors, added)}) for s in walk.steps)
    return walk.model_copy(update={"steps": steps})


def test_adjustments_of_the_writes_in_force_are_subtracted() -> None:
    given = {"a": trajectory("a", [0.9, 0.9]), "b": trajectory("b", [0.9, 0.9], frozenset({1}))}
    added = {m: _adding(walk, 100) for m, walk in given.items()}
    found = sweep({m: cutoffs(w) for m, w in added.items()}, added, prints(given))
    assert [(p.savings.freed, p.savings.overhead) for p in found] == [(12288, 200), (12288, 300)]
    assert found[1].savings.net == 12288 - 300
