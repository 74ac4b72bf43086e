"""The tables beside the stages' materialisations, of the made-up pool."""

from sandhi_core.report import ReportData, stages
from sandhi_core.report.page import Table


def records(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.columns, (c.text for c in r), strict=True)) for r in table.rows]


def test_parts_hold_every_tensor_once(data: ReportData) -> None:
    found = data.fingerprints["sorter"]
    rows = records(stages.parts_table(found))
    assert sum(int(r["tensors"]) for r in rows) == len(found.tensors)
    assert {"q", "down", "all other tensors"} <= {r["part"] for r in rows}


def test_noise_is_told_worst_first(data: ReportData) -> None:
    rows = records(stages.sensitive_table(data.profiles["converter"]))
    drops = [float(r["largest drop"]) for r in rows]
    assert drops == sorted(drops, reverse=True) and rows[0]["component"] == "attn 0"
    assert stages.sensitive_table(data.profiles["converter"].model_copy(update={"sensitivities": ()})).rows == ()


def test_groups_and_what_is_in_none_add_up(data: ReportData) -> None:
    for groups in data.groups.values():
        assert sum(int(r["groups"]) for r in records(stages.groups_table(groups))) == len(groups.groups)
        assert sum(int(r["slots"]) for r in records(stages.left_out_table(groups))) == len(groups.excluded)


def test_walks_are_told_step_by_step(data: ReportData) -> None:
    for model, walk in data.trajectories.items():
        assert len(stages.plan_table(data.plans[model]).rows) == len(data.plans[model].steps)
        rows = records(stages.steps_table(walk))
        assert [r["decision"] for r in rows] == [s.decision for s in walk.steps]
        for r, step in zip(rows, walk.steps, strict=True):
            told = [value for name, value in r.items() if name.endswith("score (change)")]
            assert (step.scores is None) == (set(told) == {"-"})
        cutoffs = records(stages.cutoffs_table(data.cutoffs[model]))
        assert [int(r["steps"]) for r in cutoffs] == [c.steps for c in data.cutoffs[model].cutoffs]


def test_looks_have_a_row_a_task(data: ReportData) -> None:
    for held in data.holdouts.values():
        rows = records(stages.looks_table(held))
        assert len(rows) == sum(len(look.tasks) for look in (held.original, *held.walked))


def test_processes_are_told_beside_their_originals(data: ReportData) -> None:
    assert data.proof is not None
    rows = records(stages.processes_table(data.proof))
    assert [r["process"] for r in rows] == [p.model for p in data.proof.memory.originals]
