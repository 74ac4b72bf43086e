"""What the pool's stages are given: the holdout's scores at the cutoffs that are deployed."""

from pathlib import Path

import pytest

from resources.bench import Bench
from sandhi_core.artifacts import Artifacts
from sandhi_core.errors import StoreError
from sandhi_core.graph import Catalogue
from sandhi_core.pools.pool import ModelEntry, Pool, TaskBudget
from tests.synthetic import holdout, points_at


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A pool of two, walked to 3 and to 2."""
    tasks = (TaskBudget(task="task", metric="acc", budget=0.02),)
    pool = Pool(name="pool", models=tuple(ModelEntry(name=m, path=f"/models/{m}", tasks=tasks) for m in "ab"))
    artifacts = Artifacts(tmp_path)
    for model, held in {"a": [1, 3], "b": [2]}.items():
        artifacts.save(("holdout", f"pool.{model}"), "", None, holdout(model, held))
    return Bench(Catalogue({"pool": pool}, dict.fromkeys("ab", "h64-bf16")), artifacts, lambda model, seconds: None)


def test_deployed_holdouts_follow_the_operating_points(bench: Bench) -> None:
    bench.artifacts.save(("operating_points", "pool"), "", None, points_at({"a": 1, "b": 2}))
    found = bench.deployed_holdouts("pool")
    assert {m: (h.steps, h.weights) for m, h in found.items()} == {"a": (1, "a-1"), "b": (2, "b-2")}


def test_points_of_an_earlier_walk_are_refused(bench: Bench) -> None:
    bench.artifacts.save(("operating_points", "pool"), "", None, points_at({"a": 2, "b": 2}))
    with pytest.raises(StoreError, match=r"model a: .* not made from this model's holdout"):
        bench.deployed_holdouts("pool")


def test_nothing_is_deployed_before_there_are_points(bench: Bench) -> None:
    with pytest.raises(StoreError, match="operating_points of pool has not run"):
        bench.deployed_holdouts("pool")
