from dataclasses import replace

from sandhi_core.report.data import ReportData, SlotState, slot_states


def states(data: ReportData, **cutoffs: int) -> dict[str, dict[tuple[int, str], SlotState]]:
    """Model to (layer, projection) to what became of it, with some models' cutoffs replaced."""
    assert data.points is not None
    point = data.points.deployed
    point = point.model_copy(update={"cutoffs": point.cutoffs | cutoffs})
    found = slot_states(data.fingerprints, data.plans, data.trajectories, point)
    return {m: {(s.slot.layer, s.slot.projection): s for s in slots} for m, slots in found.items()}


def test_a_slot_is_shared_by_those_who_accepted_it(data: ReportData) -> None:
    found = states(data)
    gate = found["sorter"][0, "gate"]
    assert gate.state == "shared"
    assert gate.holders == (
        "chemist",
        "inflector",
        "ranker",
        "sorter",
    )  # the converter rejected this layer's MLP
    assert found["converter"][0, "gate"].state == "kept"
    assert found["converter"][0, "gate"].holders == ("converter",)


def test_identical_tensors_need_no_merge(data: ReportData) -> None:
    assert {found[5, "k"].state for m, found in states(data).items() if m != "roman"} == {"duplicate"}


def test_an_outsider_has_no_partner(data: ReportData) -> None:
    assert {s.state for s in states(data)["roman"].values()} == {"excluded"}


def test_a_merged_tensor_that_nobody_else_kept_shares_nothing(data: ReportData) -> None:
    others = dict.fromkeys(("ranker", "converter", "inflector", "chemist"), 0)
    found = states(data, **others)
    alone = found["sorter"][3, "up"]
    assert (alone.state, alone.holders) == ("alone", ("sorter",))
    assert found["ranker"][3, "up"].state == "kept"


def test_every_slot_has_a_state(data: ReportData) -> None:
    found = states(data)
    assert {m: len(s) for m, s in found.items()} == {m: len(f.slots) for m, f in data.fingerprints.items()}


def test_a_pool_is_complete_once_every_model_was_held_to_unseen_questions(data: ReportData) -> None:
    assert data.complete
    assert not replace(data, holdouts={m: h for m, h in data.holdouts.items() if m != "roman"}).complete
