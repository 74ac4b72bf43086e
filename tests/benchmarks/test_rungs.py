"""The table of ways to share: its bytes are those that would be held, its drops those of unseen questions."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks import rungs
from benchmarks.ladders import Sharing, by_ladder, by_rank, judged
from benchmarks.members import Members, opened
from sandhi_core.pool import load_pool
from sandhi_core.rungs.residual import nbytes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def members(trained_pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Members:
    return opened(load_pool(trained_pool), tmp_path_factory.mktemp("rungs"))


@pytest.fixture(scope="module", params=["mean", "regmean"])
def sharing(request: pytest.FixtureRequest, members: Members) -> Sharing:
    return Sharing(members, request.param)


def held_bytes(sharing: Sharing, assigned: Mapping[str, Mapping[str, int]]) -> int:
    """Of all matrices that could be shared, counted one by one: shared once, private, residuals."""
    shared: dict[bytes, int] = {}
    total = 0
    for (model, name), tensor in sharing.shared.items():
        if name in assigned.get(model, {}):
            shared[name.encode() + tensor.float().numpy().tobytes()] = tensor.nbytes
            total += nbytes(tensor.shape, assigned[model][name])
        else:
            total += tensor.nbytes
    return total + sum(shared.values())


@pytest.mark.parametrize("rank", [0, 2, 8])
def test_net_bytes_are_those_that_are_not_held(sharing: Sharing, rank: int) -> None:
    assigned = sharing.settled(by_rank(sharing, rank))
    before = sum(tensor.nbytes for tensor in sharing.shared.values())
    assert sharing.net(assigned) == before - held_bytes(sharing, assigned)
    assert rank or sharing.net(assigned) > 0


def test_a_slot_that_saves_nothing_keeps_its_own_matrix(sharing: Sharing) -> None:
    everything = by_rank(sharing, 0)
    first = min(everything)
    assert sharing.settled({first: everything[first]}) == {first: {}}
    assert sharing.settled(everything) == everything


def test_full_rank_acts_as_the_models_own(sharing: Sharing) -> None:
    model = sorted(sharing.candidates)[0]
    for name, candidate in list(sharing.candidates[model].items())[:4]:
        acts = candidate.spectrum.truncated(min(candidate.shape)).added(sharing.shared[model, name])
        own = sharing.members.found[model].checkpoint.tensor(name).float()
        assert float((acts - own).norm() / own.norm()) < 0.01
        assert not torch.equal(sharing.shared[model, name].float(), own)


@pytest.mark.parametrize("rule", ["error", "price"])
def test_a_certified_pool_is_within_budget_and_no_bolder(sharing: Sharing, rule: str) -> None:
    point = judged("p", sharing, lambda: by_ladder(sharing, rule, "point"))
    sure = judged("c", sharing, lambda: by_ladder(sharing, rule, "certified"))
    assert point.within and sure.within
    assert sure.net <= point.net
    for model, member in sharing.members.found.items():
        budget = max(member.budgets.values())
        assert point.drops[model] <= budget + 1e-9
        assert sure.bounds[model] <= budget + 1e-9 or not sure.assigned[model]


def test_the_command_keeps_its_table(trained_pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rungs, "METHODS", ("mean",))
    monkeypatch.setattr(rungs, "RULES", ("error",))
    assert rungs.main([str(trained_pool), "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "rungs-trained.json").read_text())
    assert [row["name"] for row in rows][-2:] == ["mean, ranks by error, point", "mean, ranks by error, certified"]
    assert "of all" in (tmp_path / "rungs-trained.txt").read_text()
