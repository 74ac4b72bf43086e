from dataclasses import replace

from sandhi_core.report.data import ReportData, SlotState, shared_holdings, slot_states
from sandhi_core.report.page import shared_table
from tests.synthetic import fingerprint, points_at, tensor


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


def test_all_that_several_models_hold_is_listed_with_what_it_frees() -> None:
    """Embeddings are no slots; files that are aligned wider cost what they are filled up with."""
    shapes = {"model.embed_tokens.weight": (4096, 1024), "model.norm.weight": (3 << 19,)}
    held = shared_holdings(
        {
            model: fingerprint(model, 0).model_copy(
                update={"tensors": tuple(tensor(n, s, n) for n, s in shapes.items())}
            )
            for model in "ab"
        },
        {},
        points_at({}).deployed,
        2 << 20,
    )
    assert [[cell.text for cell in row] for row in shared_table(held, ()).rows] == [
        ["vector", "model.norm.weight", "a, b", "identical", "1.00 MiB"],
        ["vocabulary", "model.embed_tokens.weight", "a, b", "identical", "6.00 MiB"],
    ]
    assert shared_table(None, ()).empty != shared_table((), ()).empty
