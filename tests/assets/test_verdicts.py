"""What a proof's checks say, and the numbers that decided."""

from collections.abc import Mapping

import pytest

from assets.stage import Check
from assets.stages import CHECKS
from assets.verdicts import certified, verdicts, within_budget
from sandhi_core.pools.pool import HoldoutSettings, Pool
from sandhi_core.records import HoldoutScore, SharingProof
from sandhi_core.report import ReportData


def checks(data: ReportData, proof: SharingProof, least: int) -> Mapping[str, Check]:
    return {
        c.name: c
        for c in verdicts(data.pool, proof, least, data.holdouts, dict.fromkeys(data.pool.engines, "transformers"))
    }


@pytest.fixture
def proof(data: ReportData) -> SharingProof:
    assert data.proof is not None
    return data.proof


def test_every_check_is_there_with_numbers_that_can_be_plotted(data: ReportData, proof: SharingProof) -> None:
    found = checks(data, proof, 1)
    assert found.keys() == CHECKS.keys()
    for name in CHECKS.keys() - {"measured_as_deployed"}:
        assert any(isinstance(n, int | float) for n in found[name].metadata.values()), name
    assert {c.name for c in found.values() if c.warning} == {"certified", "measured_as_deployed"}
    assert found["bytes_on_disk"].metadata["bytes verified on disk"] == proof.verified_disk


def test_each_claim_of_bytes_falls_by_itself(data: ReportData, proof: SharingProof) -> None:
    less = proof.model_copy(update={"verified_disk": proof.claimed - 1})
    assert not checks(data, less, 1)["bytes_on_disk"].passed and checks(data, less, 1)["bytes_in_memory"].passed
    shared = min(proof.memory.shared, proof.memory.saved)
    assert checks(data, proof, shared)["bytes_in_memory"].passed
    assert not checks(data, proof, shared + 1)["bytes_in_memory"].passed
    memory = proof.memory.model_copy(update={"engine": "not measured: the files differ", "exports": ()})
    unmeasured = checks(data, proof.model_copy(update={"memory": memory}), -1)["bytes_in_memory"]
    assert not unmeasured.passed and unmeasured.description == "not measured: the files differ"


def changed(data: ReportData, model: str, **to: object) -> dict[str, HoldoutScore]:
    held = data.holdouts[model]
    tasks = {name: task.model_copy(update=to) for name, task in held.tasks.items()}
    return dict(data.holdouts) | {model: held.model_copy(update={"tasks": tasks})}


def asking(pool: Pool, quality: str) -> Pool:
    return pool.model_copy(update={"holdout": HoldoutSettings.model_validate({"quality": quality})})


def test_a_budget_that_is_broken_is_named(data: ReportData) -> None:
    holdouts = changed(data, "sorter", difference=-0.5, bound=-0.6)
    found = within_budget(data.pool, holdouts)
    assert not found.passed and "sorter, sort_words: -0.5000, budget 0.02" in found.description
    assert found.metadata["out of budget"] == len(data.holdouts["sorter"].tasks)
    assert found.metadata["largest share of a budget used"] == pytest.approx(25)
    sure = within_budget(asking(data.pool, "certified"), holdouts)
    assert "sorter, sort_words: -0.6000" in sure.description


def test_an_uncertified_model_is_a_warning_unless_the_pool_asks_for_certainty(data: ReportData) -> None:
    holdouts = changed(data, "sorter", certified=False, bound=-0.0312)
    told = certified(asking(data.pool, "point"), holdouts)
    assert not told.passed and told.warning and "sorter, sort_words (at least -0.0312, budget" in told.description
    assert not certified(asking(data.pool, "certified"), holdouts).warning
    sure = {m: h.model_copy(update={"tasks": {n: t.model_copy(update={"certified": True}) for n, t in h.tasks.items()}})
            for m, h in data.holdouts.items()}  # fmt: skip
    whole = certified(data.pool, sure)
    assert whole.passed and whole.metadata["certified"] == whole.metadata["models"] == len(sure)
