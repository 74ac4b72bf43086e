"""The table of ways to share: its bytes are those that would be held, its drops those of unseen questions."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks import rungs
from benchmarks.ladders import RUNGS
from benchmarks.lines import WAYS, Way, offered, varied
from benchmarks.outcomes import Loss, Outcome, told
from benchmarks.wholes import Wholes
from sandhi_core.pools.pool import load_pool
from sandhi_core.rungs.allotment import nbytes
from tests.conftest import SPECIALISTS

BASED = sorted(SPECIALISTS)


@pytest.fixture(scope="module")
def wholes(trained: Path, trained_pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Wholes:
    bases = {trained / "models" / "base": BASED}
    return Wholes(load_pool(trained_pool), bases, tmp_path_factory.mktemp("wholes"))


@pytest.mark.slow
def test_rows_without_a_search_count_bytes_and_lose_what_they_do(wholes: Wholes) -> None:
    nothing, duplicates, *adapters = wholes.rows(None)
    assert nothing.net == 0 < duplicates.net and nothing.held and duplicates.held
    assert all(loss.drop == loss.bound == 0.0 for loss in (*nothing.losses.values(), *duplicates.losses.values()))
    for rank, row in zip((8, 16), adapters, strict=True):
        freed = 0
        for slot in wholes.members[BASED[0]].fingerprint.slots:
            shape = wholes.members[BASED[0]].fingerprint.tensor(slot.tensor).shape
            freed += 2 * slot.nbytes - 3 * nbytes(shape, rank)
        assert row.net == freed + duplicates.net
        assert row.evaluations == len(BASED) and row.losses["roman"].drop == 0.0
    assert sum(adapters[1].losses[m].drop for m in BASED) <= sum(adapters[0].losses[m].drop for m in BASED) + 1e-9


@pytest.mark.slow
def test_an_adapter_of_full_rank_is_the_model_itself(wholes: Wholes) -> None:
    found = wholes._extracted(64)
    for name in BASED:
        member = wholes.members[name]
        tensor = next(iter(found[name].tensors))
        shared = wholes.store.tensor(found[name].tensors[tensor]).float()
        adjustment = found[name].adjustments[tensor]
        acts = shared + wholes.store.tensor(adjustment.up).float() @ wholes.store.tensor(adjustment.down).float()
        torch.testing.assert_close(acts, member.checkpoint.tensor(tensor).float(), atol=0.01, rtol=0.05)


@pytest.mark.parametrize("based", [True, False])
@pytest.mark.parametrize("way", [*WAYS.values(), *RUNGS.values()])
def test_every_way_of_the_pipeline_is_a_pool_file(
    way: Way, based: bool, trained: Path, trained_pool: Path, tmp_path: Path
) -> None:
    pool, bases = load_pool(trained_pool), [trained / "models" / "base"] if based else []
    made = load_pool(varied(pool, offered(way, bases), tmp_path / "pool.yaml"))
    assert made.models == pool.models and made.evaluation == pool.evaluation
    assert [base.path for base in made.bases] == [str(base) for base in bases if way.bases]


@pytest.mark.slow
def test_the_command_keeps_its_table(trained_pool: Path, tmp_path: Path) -> None:
    pair = yaml.safe_load(trained_pool.read_text())
    pair["models"] = pair["models"][:2]
    file = tmp_path / "trained.yaml"
    file.write_text(yaml.safe_dump(pair))
    asked = [str(file), "--no-mergekit", "--out", str(tmp_path), "--ways"]
    assert rungs.main([*asked, "ladder"]) == 0
    assert rungs.main([*asked, rungs.WHOLES]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "rungs-trained.json").read_text())}
    assert [*rows] == ["ladder, point", "ladder, certified", "no sharing", "exact duplicates"]
    point, certified = rows["ladder, point"], rows["ladder, certified"]
    for loss in certified["losses"].values():
        assert loss["bound"] <= loss["budget"] + 1e-9
    assert rows["exact duplicates"]["net"] <= certified["net"] <= point["net"] < point["whole"]
    assert point["seconds"] < certified["seconds"] and point["evaluations"] <= certified["evaluations"]
    assert "ladder, certified" in (tmp_path / "rungs-trained.txt").read_text()


def test_a_row_says_whether_budgets_held() -> None:
    held, lost = Loss(0.02, 0.03, 0.02), Loss(0.03, 0.05, 0.02)
    rows = [Outcome("fine", 10, 100, {"m": held}, 1, 1.0), Outcome("broken", 60, 100, {"m": lost}, 1, 1.0, ["why"])]
    text = told(rows).splitlines()
    assert "yes" in text[2] and "NO" not in text[2] and "2.0 (3.0)" in text[2]
    assert "NO" in text[3] and "60.0 %" in text[3] and text[4] == "broken: why"
