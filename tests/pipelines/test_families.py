"""Models of two bases and strangers in one pool, all of one shape: the groups stage keeps families apart."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from assets.stage import Job
from assets.stages import STAGE_ASSETS
from resources.bench import Bench
from sandhi_core.artifacts import Artifacts
from sandhi_core.catalogue import Planner, load_catalogue
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.errors import MergeError
from sandhi_core.grouping.form import NO_KIN
from sandhi_core.pools.pool import Pool
from sandhi_core.records import Fingerprint, Groups, Plan
from tests.models import edit_tensors, fine_tune, tiny_llama
from tests.pipelines.conftest import PoolWriter
from tests.synthetic import PROJECTIONS, profile

BASES = {"a": 1, "b": 2, "c": 1, "d": 2, "lone": 3, "odd": 4, "e": 2}
FOUNDERS = ("a", "b", "c", "d", "lone", "odd")
GROUP = "tiny.h32-bf16"
LAYERS = 2
SLOTS = LAYERS * len(PROJECTIONS)


@pytest.fixture
def tuned_pool(tiny_pool: PoolWriter, tmp_path: Path) -> PoolWriter:
    """Writes a pool of fine-tunes, each of the base that it has in BASES."""
    for seed, (name, base) in enumerate(BASES.items()):
        fine_tune(tiny_llama(tmp_path / name, seed=base), seed=100 + seed, moved=0.05)
    return tiny_pool


def grouped(pool: Path, root: Path, *, regroup: bool = False) -> Bench:
    """The stages up to the plans of a pool, each by itself; profiles are made up, because families need no score."""
    catalogue = load_catalogue([pool])
    bench = Bench(catalogue, Artifacts(root), lambda model, seconds: None)
    for model in catalogue.keys("model"):
        materialise(bench, "checkpoint", model)
        bench.artifacts.save(("profile", model), "", {}, profile(model, LAYERS))
    materialise(bench, "groups", GROUP, regroup)
    for member in catalogue.keys("member"):
        materialise(bench, "plan", member)
    return bench


def materialise(bench: Bench, stage: str, key: str, regroup: bool = False) -> None:
    outcome = STAGE_ASSETS[stage].run(Job(bench, key, regroup, lambda line: None))
    own = Planner(bench.catalogue, bench.artifacts).own((stage, key))
    bench.artifacts.save((stage, key), "", own, outcome.record)


def sets(bench: Bench) -> dict[str, int]:
    """Models that are together in a group, and in how many."""
    found = bench.artifacts.load(Groups, "groups", GROUP).groups
    return Counter(" ".join(slot.model for slot in group.members) for group in found)


def sources(bench: Bench, model: str) -> set[str]:
    """The models whose weights the plan of a model would put into it."""
    steps = bench.artifacts.load(Plan, "plan", f"tiny.{model}").steps
    return {c.model for step in steps for merge in step.merges for c in merge.recipe.contributors}


def test_no_group_holds_models_of_two_bases(tuned_pool: PoolWriter, tmp_path: Path) -> None:
    bench = grouped(tuned_pool(FOUNDERS), tmp_path / "root")
    assert sets(bench) == {"a c": SLOTS, "b d": SLOTS, "lone odd": SLOTS}
    assert sources(bench, "a") == sources(bench, "c") == {"a", "c"}
    assert sources(bench, "b") == sources(bench, "d") == {"b", "d"}


def test_one_stranger_among_families_shares_nothing(tuned_pool: PoolWriter, tmp_path: Path) -> None:
    bench = grouped(tuned_pool(["a", "b", "c", "d", "lone"]), tmp_path / "root")
    assert sets(bench) == {"a c": SLOTS, "b d": SLOTS}
    left = bench.artifacts.load(Groups, "groups", GROUP).excluded
    assert {(e.model, e.reason) for e in left} == {("lone", NO_KIN)} and len(left) == SLOTS
    assert sources(bench, "lone") == set()


@pytest.mark.parametrize("regroup", [False, True])
def test_a_newcomer_goes_to_its_own_family(tuned_pool: PoolWriter, tmp_path: Path, regroup: bool) -> None:
    root = tmp_path / "root"
    grouped(tuned_pool(FOUNDERS), root)
    bench = grouped(tuned_pool([*FOUNDERS, "e"]), root, regroup=regroup)
    assert sets(bench) == {"a c": SLOTS, "b d e": SLOTS, "lone odd": SLOTS}
    assert sources(bench, "e") == ({"b", "d", "e"} if regroup else {"b", "d"})
    assert sources(bench, "a") == {"a", "c"}


def test_strangers_part_when_their_kin_come(tuned_pool: PoolWriter, tmp_path: Path) -> None:
    """Whoever came first: the groups are those of a pool that begins with all of them."""
    root = tmp_path / "root"
    assert sets(grouped(tuned_pool(["a", "b"]), root)) == {"a b": SLOTS}
    assert sets(grouped(tuned_pool(["a", "b", "c"]), root)) == {"a c": SLOTS}
    assert sets(grouped(tuned_pool(["a", "b", "c", "d"]), root)) == {"a c": SLOTS, "b d": SLOTS}


def test_each_family_is_offered_its_own_base(tuned_pool: PoolWriter, tmp_path: Path) -> None:
    bases = [str(tiny_llama(tmp_path / f"base {n}", seed=n)) for n in (1, 2)]
    merging = {"methods": ["base"], "bases": bases}
    bench = grouped(tuned_pool(["a", "b", "c", "d"], merging=merging), tmp_path / "root")
    assert sources(bench, "a") == sources(bench, "c") == {"merging.bases[0]"}
    assert sources(bench, "b") == sources(bench, "d") == {"merging.bases[1]"}


def test_a_base_that_changed_after_the_groups_were_formed_is_refused(tuned_pool: PoolWriter, tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", seed=1)
    pool = tuned_pool(["a", "c"], merging={"methods": ["base"], "bases": [str(base)]})
    bench = grouped(pool, tmp_path / "root")
    recipes = [m.recipe for s in bench.artifacts.load(Plan, "plan", "tiny.a").steps for m in s.merges]
    shared = bench.shared_tensors(bench.catalogue.pools["tiny"])
    assert [shared.digest(recipe) for recipe in recipes] == [r.contributors[0].digest for r in recipes]
    edit_tensors(base, lambda t: [tensor.add_(1.0) for tensor in t.values() if tensor.dtype == torch.bfloat16])
    again = Bench(bench.catalogue, Artifacts(tmp_path / "other"), lambda model, seconds: None)
    with pytest.raises(MergeError, match="checkpoint changed") as caught:
        again.shared_tensors(again.catalogue.pools["tiny"]).digest(recipes[0])
    assert caught.value.problem.model == "merging.bases[0]"


def test_a_model_is_opened_once_for_all_that_it_contributes(
    tuned_pool: PoolWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = grouped(tuned_pool(["a", "c"]), tmp_path / "root")
    recipes = [m.recipe for s in bench.artifacts.load(Plan, "plan", "tiny.a").steps for m in s.merges]
    opened: list[str] = []
    real = Bench.opened

    def counted(self: Bench, pool: Pool, name: str) -> tuple[Checkpoint, Fingerprint]:
        opened.append(name)
        return real(self, pool, name)

    monkeypatch.setattr(Bench, "opened", counted)
    bench.shared_tensors(bench.catalogue.pools["tiny"]).prepare(recipes)
    assert len(recipes) > 1 and sorted(opened) == ["a", "c"]
