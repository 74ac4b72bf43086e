"""The adapter on a small made-up recording, with everything that recordings may hold; runs without the real ones."""

from pathlib import Path

import pytest

from sandhi_core.assignment import assignment_at
from tests.conformance.candidates import recorded_clusterings
from tests.conformance.families import MIB, family_of
from tests.conformance.points import compared, reached, sweep_of
from tests.conformance.recorded import RecordedRun, contributors, recorded_runs

LLAMA, OTHER, DEEP = "Llama-3.1-8B-a", "calme-2.3-b", "deepseek-math-c"
OPS = {
    LLAMA: (
        ["merge,mlp_up,3,", "merge,mlp_down,3,", "merge,attn_q,5,"],
        ["merge,attn_q,5,", "merge,mlp_gate,31,"],
    ),
    OTHER: (["merge,mlp_up,3,", "merge,mlp_down,3,"], []),
    DEEP: (["merge,attn_q,5,", "keep,attn_k,5,", "merge,mlp_gate,29,"], []),
}
MODELS = {
    "mlp_up,3,": f'"{LLAMA}:3,{OTHER}:3"',
    "mlp_down,3,": f'"{OTHER}, {LLAMA}"',  # in the row's own layer
    "attn_q,5,": f'"{LLAMA}:5,{DEEP}:5"',  # across families: the shapes agree
    "mlp_gate,31,": f'"{LLAMA}:31,{OTHER}:30"',
    "attn_k,5,": DEEP,
    "mlp_gate,29,": f'"{LLAMA}:7"',  # does not name the model itself
}
LOGS = {
    LLAMA: [
        "0,1,merge,mlp,3,79.5,accepted,False",
        "1,1,merge,attn,5,70,rejected,False",
        "2,2,merge,attn,5,79,accepted,",
    ],
    OTHER: ["0,1,merge,mlp,3,61,accepted,False"],
    DEEP: ["0,1,merge,attn,5,49.5,accepted,True", "1,1,merge,mlp,29,nan,rejected,True"],
}
BASELINES = {LLAMA: 80.0, OTHER: 60.0, DEEP: 50.0}
HEADER = "timestamp,step_idx,stage,op,component,layer,score,decision,scaled,label,threshold"


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "three"
    for label, stages in OPS.items():
        for stage, rows in enumerate(stages, start=1):
            path = run / "clustering" / "sub" / f"ops_step{stage}_{label}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            full = [row + next(m for start, m in MODELS.items() if row.endswith(start)) for row in rows]
            path.write_text("\n".join(["op,component,layer,models", *full]) + "\n")
        log = run / "micr" / "sub" / label / "steps.csv"
        log.parent.mkdir(parents=True)
        baseline = f"-1,0,baseline,baseline,-1,{BASELINES[label]},baseline,False"
        log.write_text("\n".join([HEADER, *(f"t,{row},{label},2.0" for row in [baseline, *LOGS[label]])]) + "\n")
    return tmp_path


@pytest.fixture
def three(recording: Path) -> RecordedRun:
    (run,) = recorded_runs(recording)
    return run


def test_contributors_without_a_layer_are_in_the_row_s_own() -> None:
    assert contributors("b:2, a ,c:x", 7) == (("a", 7), ("b", 2), ("c", 7))


def test_steps_are_blocks_of_one_stage_layer_and_component(three: RecordedRun) -> None:
    llama, other, deep = (next(m for m in three.models if m.label == label) for label in (LLAMA, OTHER, DEEP))
    # The same component twice in a row, but of two stages; the last proposal was never reached.
    assert [(s.component, s.layer, len(s.merges)) for s in llama.plan.steps] == [
        ("mlp", 3, 2),
        ("attn", 5, 1),
        ("attn", 5, 1),
    ]
    assert [s.decision for s in llama.trajectory.steps] == ["accepted", "rejected", "accepted"]
    assert [len(s.merges) for s in deep.plan.steps] == [1, 0]
    assert deep.trajectory.steps[1].scores is None
    assert [a.nbytes for a in deep.trajectory.steps[0].adjustments.values()] == [16 * 4096]
    assert other.plan.steps[0].merges == llama.plan.steps[0].merges
    assert (llama.steps_at(-1), llama.steps_at(1), llama.steps_at(9)) == (0, 2, 3)
    assert assignment_at(deep.trajectory, 2).tensors == {
        name: digest for name, digest in assignment_at(llama.trajectory, 3).tensors.items() if "q_proj" in name
    }


def test_savings_of_models_with_different_layers(three: RecordedRun) -> None:
    sizes = [m.fingerprint.nbytes / MIB for m in three.models]
    assert sorted(sizes) == [13180.5, 15316.5, 15316.5]
    ends = sweep_of(three)
    assert [p.savings.freed // MIB for p in ends] == [
        224,
        224,
        256,
    ]  # up and down of two Llamas, then q with DeepSeek's
    assert [p.savings.overhead for p in ends] == [16 * 4096] * 3
    assert reached(three, ends[-1]) == pytest.approx({"Llama-3-1-8B-a": 79, "calme-2-3-b": 61, "deepseek-math-c": 49.5})


def test_points_follow_the_report_s_criteria(recording: Path, three: RecordedRun) -> None:
    results = recording / "results" / "three"
    results.mkdir(parents=True)
    points = [
        "A,unmerged reference,0",
        "B,acc drop <= 0.6%,0.5",
        "Bpm,per-model acc drop <= 0.6%,0.5",
        "P,mem savings ~ 0.55%,0.5",
    ]
    (results / "report.csv").write_text("\n".join(["point,criterion,savings_pct", *points]) + "\n")
    found = {c.row["point"]: c for c in compared(three)}
    steps = {name: list(c.ours.cutoffs.values()) for name, c in found.items()}
    assert steps == {"A": [0, 0, 0], "B": [1, 1, 1], "Bpm": [1, 1, 1], "P": [3, 1, 1]}
    assert found["B"].gross == pytest.approx(100 * 224 / 43813.5)
    assert found["B"].net == pytest.approx(100 * (224 - 1 / 16) / 43813.5)


def test_proposals_are_read_once_whoever_repeats_them(recording: Path) -> None:
    (clustering,) = recorded_clusterings(recording)
    assert clustering.name == "runs/three" and clustering.statistics is None
    assert len(clustering.recorded()) == 6 and set(clustering.proposals) == set(OPS)
    assert [b[:3] for b in clustering.blocks(LLAMA)] == [(1, "mlp", 3), (1, "attn", 5), (2, "attn", 5), (2, "mlp", 31)]


@pytest.mark.parametrize(
    ("label", "layers", "family"),
    [
        ("Llama-3.1-Hawkish-8B", None, 32),
        ("anything", 28, 28),
        ("T-pro-it-2.0", None, 64),
        ("deepseek-llama-distill", None, 30),
    ],
)
def test_family_by_layers_then_by_name(label: str, layers: int | None, family: int) -> None:
    assert family_of(label, layers).layers == family


@pytest.mark.parametrize(("label", "layers"), [("gemma", None), ("Llama-3.2-1B", 16)])
def test_an_unknown_family_is_an_error_that_names_the_model(label: str, layers: int | None) -> None:
    with pytest.raises(ValueError, match=label):
        family_of(label, layers)


def test_a_log_without_a_baseline_is_an_error(recording: Path) -> None:
    log = recording / "runs" / "three" / "micr" / "sub" / OTHER / "steps.csv"
    log.write_text("\n".join([HEADER, f"t,{LOGS[OTHER][0]},{OTHER},2.0"]) + "\n")
    with pytest.raises(ValueError, match="no baseline"):
        list(recorded_runs(recording))


@pytest.mark.parametrize("family", ["Llama-3.1", "deepseek-7b", "Qwen2.5-7B", "MedGo"])
def test_sizes_are_those_of_the_recordings_readme(family: str) -> None:
    expected = {
        "Llama-3.1": [32, 8, 8, 32, 112, 112, 112],
        "deepseek-7b": [32, 32, 32, 32, 86, 86, 86],
        "Qwen2.5-7B": [24.5, 3.5, 3.5, 24.5, 129.5, 129.5, 129.5],
        "MedGo": [80, 10, 10, 80, 250, 250, 250],
    }
    found = family_of(family, None)
    shapes = [found.shape(p) for p in ("q", "k", "v", "o", "gate", "up", "down")]
    assert [2 * rows * columns / MIB for rows, columns in shapes] == expected[family]
