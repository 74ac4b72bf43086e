"""What a model holds at one place of its trajectory."""

from sandhi_core.assignment import Assignment, assignment_at, factor_names, factors_among, parts_of, vector_names
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
    assert down == "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert up == "model.layers.0.self_attn.q_proj.lora_B.weight"


def test_an_adjustment_names_what_it_has() -> None:
    layer = "model.layers.0.mlp.up_proj"
    factors = {f"{layer}.lora_A.weight": "d", f"{layer}.lora_B.weight": "u"}
    vectors = {f"{layer}.row_scale": "s", f"{layer}.row_shift": "t"}
    assert (*vector_names(f"{layer}.weight"),) == (*vectors,)
    for given in (factors, vectors, factors | vectors):
        fields = dict(zip(("down", "up", "scale", "shift"), ("d", "u", "s", "t"), strict=True))
        fields = {field: digest for field, digest in fields.items() if digest in given.values()}
        added = Adjustment(kind="affine" if "scale" in fields else "low_rank", nbytes=4, **fields)
        assert parts_of(f"{layer}.weight", added) == given
        assert factors_among([f"{layer}.weight", *given]) == dict.fromkeys(given, f"{layer}.weight")


def test_kinds_without_vectors_keep_the_bytes_that_they_had() -> None:
    plain = Adjustment(kind="low_rank", nbytes=4, rank=1, down="d", up="u")
    assert plain.canonical() == b'{"down":"d","kind":"low_rank","nbytes":4,"rank":1,"up":"u"}'
    affine = Adjustment(kind="affine", nbytes=4, scale="s", shift="t")
    assert affine.canonical() == b'{"down":"","kind":"affine","nbytes":4,"rank":0,"scale":"s","shift":"t","up":""}'
    assert Adjustment.parse(affine.canonical()) == affine and Adjustment.parse(plain.canonical()) == plain
