"""What a model holds at one place of its trajectory."""

from sandhi_core.assignment import Assignment, assignment_at, factor_names
from sandhi_core.records import Adjustment, Step, Trajectory


def low_rank(rank: int) -> Adjustment:
    return Adjustment(kind="low_rank", nbytes=16 * rank, rank=rank, down=f"d{rank}", up=f"u{rank}")


def walk(*steps: Step) -> Trajectory:
    return Trajectory(
        pool="p", model="m", plan="x", baseline={}, higher_is_better={}, tolerance={}, questions={}, evaluations=0,
        steps=steps,
    )  # fmt: skip


def step(index: int, tensors: dict[str, str], decision: str = "accepted", **ranks: int) -> Step:
    adjustments = {name: low_rank(rank) for name, rank in ranks.items()}
    return Step(index=index, decision=decision, scores=None, tensors=tensors, adjustments=adjustments)  # type: ignore[arg-type]


def test_a_later_write_replaces_tensor_and_residual() -> None:
    trajectory = walk(
        step(0, {"a": "1", "b": "1"}, a=4, b=2),
        step(1, {"a": "2"}, "rejected", a=1),
        step(2, {"a": "1", "c": "3"}, c=1),
    )
    assert assignment_at(trajectory, 0) == Assignment()
    assert assignment_at(trajectory, 1) == Assignment({"a": "1", "b": "1"}, {"a": low_rank(4), "b": low_rank(2)})
    assert assignment_at(trajectory, 2) == assignment_at(trajectory, 1)
    assert assignment_at(trajectory, 3) == Assignment(
        {"a": "1", "b": "1", "c": "3"}, {"b": low_rank(2), "c": low_rank(1)}
    )
    assert assignment_at(trajectory, 3).overhead == 48


def test_an_identity_tells_residuals_apart_and_is_the_digest_where_there_is_none() -> None:
    plain, low, high = (Assignment({"a": "1", "b": "2"}, {"a": low_rank(r)} if r else {}) for r in (0, 1, 2))
    assert plain.identities == {"a": "1", "b": "2"}
    assert len({one.identities["a"] for one in (plain, low, high)}) == 3
    assert {one.identities["b"] for one in (plain, low, high)} == {"2"}


def test_factors_have_pefts_names() -> None:
    down, up = factor_names("model.layers.0.self_attn.q_proj.weight")
    assert down == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert up == "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
