"""The planner on a pool that is edited: what re-runs is exactly what the design's table says."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.errors import PoolError
from sandhi_core.graph import (
    STAGES,
    Catalogue,
    Node,
    Stored,
    fingerprint,
    own_inputs,
    schedule,
)
from sandhi_core.pools.pool import Pool
from sandhi_core.records import digest_of
from sandhi_core.rungs.allotment import LADDER_VERSION

Files = dict[str, str]  # model to a stand-in for what its files hold


def make_pool(name: str, models: Iterable[str], budgets: dict[str, float] | None = None, **sections: Any) -> Pool:
    return Pool.model_validate(
        {
            "name": name,
            "models": [
                {
                    "name": m,
                    "path": f"/models/{m}",
                    "tasks": [{"task": f"task_{m}", "metric": "acc", "budget": (budgets or {}).get(m, 0.02)}],
                }
                for m in models
            ],
            **sections,
        }
    )


class World:
    """Runs the planner's waves over stages that only hash: what a record depends on is as in the real stages."""

    def __init__(self) -> None:
        self.stored: dict[Node, Stored] = {}

    def build(self, catalogue: Catalogue, files: Files, forced: frozenset[Node] = frozenset()) -> set[Node]:
        graph = catalogue.graph()

        def own(node: Node) -> Any:
            return own_inputs(catalogue, node, lambda _, e: files[e.name], lambda _, e: [t.task for t in e.tasks])

        ran: set[Node] = set()
        while frontier := schedule(graph, own, self.stored.get, forced).frontier:
            for node, wanted in frontier.items():
                upstream = {u: self.stored[u].data_version for u in graph[node]}
                assert wanted == fingerprint(node, own(node), upstream)
                assert node not in ran, "a node ran twice in one build"
                self.stored[node] = Stored(wanted, self._record(catalogue, node, own(node), upstream))
                ran.add(node)
            forced -= frontier.keys()
        return ran

    def _record(self, catalogue: Catalogue, node: Node, own: Any, upstream: dict[Node, str]) -> str:
        stage, key = node
        if stage == "checkpoint":
            return digest_of(own["files"].partition("@")[0])  # what follows @ is a time: not part of the record
        if stage == "plan" and own["grouping"]["on_new_model"] == "join":
            mine = {u: v for u, v in upstream.items() if u[0] == "checkpoint"}
            return digest_of(["plan", key, sorted(mine.values())])
        return digest_of([stage, own, sorted(upstream.values())])


def stages(ran: set[Node], member: str | None = None) -> set[str]:
    return {s for s, k in ran if member is None or k.rpartition(".")[2] == member}


POOL_STAGES = {s for s, stage in STAGES.items() if stage.scope == "pool"}
MODELS = ("a", "b", "c")
GROUPS = {"a": "h8", "b": "h8", "c": "h8", "d": "h8", "x": "h16", "y": "h16"}
FILES = {m: f"weights-{m}" for m in GROUPS}


def catalogue(*pools: Pool) -> Catalogue:
    return Catalogue({p.name: p for p in pools}, GROUPS)


@pytest.fixture
def world() -> World:
    built = World()
    assert built.build(catalogue(make_pool("p", ["a", "b", "c", "x", "y"])), FILES)
    return built


def test_graph_is_in_running_order() -> None:
    seen: set[Node] = set()
    for node, upstream in catalogue(make_pool("p", ["a", "x"]), make_pool("q", ["a", "b"])).graph().items():
        assert set(upstream) <= seen
        seen.add(node)
    assert {s for s, _ in seen} == set(STAGES)


def test_groups_never_meet_across_widths() -> None:
    graph = catalogue(make_pool("p", ["a", "b", "x"])).graph()
    assert {k for s, k in graph["groups", "p.h16"]} == {"x"}
    assert {k for s, k in graph["groups", "p.h8"]} == {"a", "b"}


def test_nothing_changed_runs_nothing(world: World) -> None:
    assert world.build(catalogue(make_pool("p", ["a", "b", "c", "x", "y"])), FILES) == set()


def test_a_model_that_joins_leaves_the_others_alone(world: World) -> None:
    ran = world.build(catalogue(make_pool("p", ["a", "b", "c", "d", "x", "y"])), FILES)
    own = {(s, "d") for s in ("checkpoint", "profile")} | {(s, "p.d") for s in ("trajectory", "cutoffs", "holdout")}
    plans = {("plan", f"p.{m}") for m in "abcd"}  # looked at again, found equal
    assert ran == own | plans | {("groups", "p.h8")} | {(s, "p") for s in POOL_STAGES}


def test_regroup_walks_the_affected_group_again_and_no_other(world: World) -> None:
    regroup = {"grouping": {"on_new_model": "regroup"}}
    five = World()
    five.build(catalogue(make_pool("p", ["a", "b", "c", "x", "y"], **regroup)), FILES)
    ran = five.build(catalogue(make_pool("p", ["a", "b", "c", "d", "x", "y"], **regroup)), FILES)
    assert {k for s, k in ran if s == "trajectory"} == {"p.a", "p.b", "p.c", "p.d"}
    assert {k for s, k in ran if s == "profile"} == {"d"}
    assert ("groups", "p.h16") not in ran


def test_a_budget_changed_within_the_tolerance(world: World) -> None:
    tolerant = {"search": {"tolerance": 0.05}}
    built = World()
    built.build(catalogue(make_pool("p", MODELS, **tolerant)), FILES)
    ran = built.build(catalogue(make_pool("p", MODELS, {"b": 0.04}, **tolerant)), FILES)
    # The other tasks' tolerances are shares of the same number, so only b's own nodes move.
    assert stages(ran, "b") >= {"cutoffs", "holdout"}
    assert {k for s, k in ran if s in ("cutoffs", "holdout", "trajectory")} == {"p.b"}
    assert not stages(ran) & {"checkpoint", "profile", "groups"}
    assert {s for s, k in ran if k == "p"} == POOL_STAGES


def test_what_must_be_shown_on_the_holdout_changed(world: World) -> None:
    certified = {"holdout": {"quality": "certified"}}
    ran = world.build(catalogue(make_pool("p", ["a", "b", "c", "x", "y"], **certified)), FILES)
    assert {s for s, k in ran if k.startswith("p.")} == {"holdout"}
    assert {s for s, k in ran if k == "p"} <= POOL_STAGES and not stages(ran) & {"checkpoint", "profile", "groups"}


def test_weights_changed(world: World) -> None:
    ran = world.build(catalogue(make_pool("p", ["a", "b", "c", "x", "y"])), {**FILES, "x": "other"})
    assert stages(ran, "x") >= {"checkpoint", "profile", "plan", "trajectory"}
    assert ("groups", "p.h16") in ran
    assert ("groups", "p.h8") not in ran
    assert {k for s, k in ran if s == "profile"} == {"x"}


def test_a_file_touched_but_equal_stops_at_the_checkpoint(world: World) -> None:
    ran = world.build(catalogue(make_pool("p", ["a", "b", "c", "x", "y"])), {**FILES, "x": "weights-x@later"})
    assert ran == {("checkpoint", "x")}


def test_a_model_removed_profiles_nothing(world: World) -> None:
    ran = world.build(catalogue(make_pool("p", ["a", "b", "x", "y"])), FILES)
    assert not stages(ran) & {"checkpoint", "profile"}
    assert {k for s, k in ran if s == "groups"} == {"p.h8"}


def test_a_model_in_two_pools_is_profiled_once() -> None:
    built = World()
    ran = built.build(catalogue(make_pool("p", ["a", "b"]), make_pool("q", ["a", "c"])), FILES)
    assert sum(1 for s, k in ran if (s, k) == ("profile", "a")) == 1
    assert {k for s, k in ran if s == "plan"} == {"p.a", "p.b", "q.a", "q.c"}


def test_two_definitions_of_one_name_are_refused() -> None:
    with pytest.raises(PoolError, match="'a' is defined differently in pools 'p' and 'q'"):
        catalogue(make_pool("p", ["a"]), make_pool("q", ["a"], profile={"seeds": [7]}))


def test_forced_groups_run_once_and_equal_ones_stop_the_wave(world: World) -> None:
    pool = make_pool("p", ["a", "b", "c", "x", "y"])
    ran = world.build(catalogue(pool), FILES, frozenset({("groups", "p.h8")}))
    assert ran == {("groups", "p.h8")}


@pytest.mark.parametrize("stage", STAGES)
def test_a_new_stage_version_re_runs_the_stage(stage: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setitem(STAGES, stage, replace(STAGES[stage], version=STAGES[stage].version + 1))
    ran = world.build(catalogue(make_pool("p", ["a", "b", "c", "x", "y"])), FILES)
    current = catalogue(make_pool("p", ["a", "b", "c", "x", "y"]))
    assert {(s, k) for s, k in ran if s == stage} == {(stage, k) for k in current.keys(STAGES[stage].scope)}


BASES = {"merging": {"methods": ["base", "mean"], "bases": ["/models/base"]}}


@pytest.fixture
def based() -> tuple[World, Pool, Files]:
    """A world with a pool that compares methods, one of them a base's."""
    built, pool = World(), make_pool("p", ["a", "b", "x"], **BASES)
    files = {**FILES, "merging.bases[0]": "base"}
    built.build(catalogue(pool), files)
    return built, pool, files


def test_a_base_that_changed_forms_the_groups_anew(based: tuple[World, Pool, Files]) -> None:
    built, pool, files = based
    assert built.build(catalogue(pool), files) == set()
    ran = built.build(catalogue(pool), {**files, "merging.bases[0]": "other"})
    assert {k for s, k in ran if s == "groups"} == {"p.h8", "p.h16"}
    assert not stages(ran) & {"checkpoint", "profile"}


@pytest.mark.parametrize("stage", ["operating_points", "merged_weights"])
def test_an_alignment_stands_beside_models_not_among_them(stage: str) -> None:
    def own(alignment: str) -> Any:
        pool = make_pool("p", ["a", "alignment"], deploy={"alignment": alignment})
        return own_inputs(catalogue(pool), (stage, "p"), lambda *_: {}, lambda *_: {})

    narrow, wide = own("4KiB"), own("2MiB")
    assert wide["alignment"] == "2MiB"
    if stage == "operating_points":  # what pools without it have had from the first
        assert narrow == {"a": {"task_a": 0.02}, "alignment": {"task_alignment": 0.02}}
        assert wide["budgets"] == narrow
    else:
        assert narrow == {"models": ["a", "alignment"]} == {k: v for k, v in wide.items() if k != "alignment"}


def test_an_engine_of_ones_own_is_a_matter_of_proof_and_deployment_alone() -> None:
    built, pool = World(), make_pool("p", MODELS)
    built.build(catalogue(pool), FILES)

    def with_engine(**engines: str) -> Pool:
        models = [m.model_copy(update={"engine": engines.get(m.name)}) for m in pool.models]
        return pool.model_copy(update={"models": tuple(models)})

    for same in (with_engine(), with_engine(a="vllm", b="vllm")):  # whether it is written or not
        assert built.build(catalogue(same), FILES) == set()
    assert built.build(catalogue(with_engine(b="transformers")), FILES) == {
        ("sharing_proof", "p"),
        ("deployment", "p"),
    }
    assert built.build(catalogue(with_engine(b="transformers", a="vllm")), FILES) == set()


def test_what_weighs_inputs_is_seen_by_the_groups_and_by_no_others(based: tuple[World, Pool, Files]) -> None:
    """A task may change without any score of the profile: then the groups are all that tells."""
    built, pool, files = based
    catalogued = catalogue(pool)

    def own(pool: Pool, asked: str, node: Node) -> Any:
        return own_inputs(catalogue(pool), node, lambda _, e: files[e.name], lambda _, e: [asked, e.name])

    assert own(pool, "", ("groups", "p.h8")) != own(pool, "more", ("groups", "p.h8"))
    plain = make_pool("p", ["a", "b", "x"])
    assert own(plain, "", ("groups", "p.h8")) == own(plain, "more", ("groups", "p.h8"))
    for merging in ({"methods": ["regmean"]}, {"methods": ["mean"], "reform": True}):
        weighed = make_pool("p", ["a", "b", "x"], merging=merging)
        assert own(weighed, "", ("groups", "p.h8")) != own(weighed, "more", ("groups", "p.h8"))
    assert "x" not in str(own(pool, "", ("groups", "p.h8"))["weighing"])
    assert built.build(catalogued, files) == set()


@pytest.mark.parametrize("merging", [{"methods": ["mean"]}, {"methods": ["base"]}, {"methods": ["mean", "base"]}])
def test_other_methods_are_noticed(merging: dict[str, Any], based: tuple[World, Pool, Files]) -> None:
    built, _, files = based
    bases = {"bases": ["/models/base"]} if "base" in merging["methods"] else {}
    ran = built.build(catalogue(make_pool("p", ["a", "b", "x"], merging={**merging, **bases})), files)
    assert {s for s, k in ran if k.startswith("p.")} >= {"groups"} and not stages(ran) & {"checkpoint", "profile"}


WEIGHED: dict[str, Any] = {
    "merging": {"methods": ["mean", "member"], "residuals": "low_rank"},
    "search": {"strategy": "ladder"},
    "deploy": {"adapters": {"max_rank": 64}},
}


@pytest.mark.parametrize(
    "changed",
    [
        {"search": {"strategy": "ladder", "errors": "outputs"}},
        {"deploy": {"adapters": {"max_rank": 8}}},
        {"deploy": {}},
    ],
)
def test_how_slots_bid_is_noticed_where_methods_are_compared_and_only_there(changed: dict[str, Any]) -> None:
    for merging, noticed in ((WEIGHED["merging"], True), ({"residuals": "low_rank"}, False)):
        built = World()
        built.build(catalogue(make_pool("p", MODELS, **{**WEIGHED, "merging": merging})), FILES)
        ran = built.build(catalogue(make_pool("p", MODELS, **{**WEIGHED, "merging": merging, **changed})), FILES)
        assert (("groups", "p.h8") in ran) == noticed and not stages(ran) & {"checkpoint", "profile"}
        assert {("trajectory", f"p.{m}") for m in MODELS} <= ran


edits: st.SearchStrategy[Callable[[set[str], Files], None]] = st.one_of(
    st.sampled_from(sorted(GROUPS)).map(lambda m: lambda models, files: models.add(m)),
    st.sampled_from(sorted(GROUPS)).map(lambda m: lambda models, files: models.discard(m)),
    st.tuples(st.sampled_from(sorted(GROUPS)), st.integers(0, 2)).map(
        lambda pair: lambda models, files: files.update({pair[0]: f"weights-{pair[1]}"})
    ),
)


@given(st.lists(edits, max_size=8))
def test_any_order_of_edits_ends_where_a_fresh_build_does(
    sequence: list[Callable[[set[str], Files], None]],
) -> None:
    """With regroup, history leaves no trace: the same pool has the same records however it came about."""
    models, files, history = {"a"}, dict(FILES), World()
    for edit in [lambda m, f: None, *sequence]:
        edit(models, files)
        if models:
            pool = make_pool("p", sorted(models), grouping={"on_new_model": "regroup"})
            history.build(catalogue(pool), files)
    if models:
        fresh = World()
        fresh.build(catalogue(pool), files)
        assert {n: history.stored[n] for n in fresh.stored} == fresh.stored
        assert history.build(catalogue(pool), files) == set()


def test_vectors_are_named_to_the_trajectories_only_where_they_are_on() -> None:
    def ladder_of(**merging: str) -> Any:
        pool = make_pool("p", ["a"], search={"strategy": "ladder"}, merging=merging)
        nothing = lambda pool, entry: None  # noqa: E731
        return own_inputs(Catalogue({"p": pool}, {"a": "g"}), ("trajectory", "p.a"), nothing, nothing)["ladder"]

    assert ladder_of() == ladder_of(affine="none") == [LADDER_VERSION, "none"]
    assert ladder_of(affine="rows") == [LADDER_VERSION, "none", "affine"]
    assert ladder_of(residuals="low_rank", affine="rows") == [LADDER_VERSION, "low_rank", "affine"]
