"""Which part of a tensor a rank holds."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional

from sandhi_core.errors import CheckpointError, ServingError
from sandhi_core.serving.slices import WHOLE, Slice, Slices

Q, K, O = (f"model.layers.1.self_attn.{p}_proj.weight" for p in "qko")  # noqa: E741
GATE, DOWN = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def config(model_type: str = "llama", **given: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "pad_token_id": None,
    }
    return {"model_type": model_type, **sizes, **given}


def test_examples() -> None:
    slices = Slices("m", config(), 2, 1)
    assert slices.of(Q) == Slice(0, ((16, 32),))
    assert slices.of(K) == Slice(0, ((8, 16),))
    assert slices.of(O) == Slice(1, ((16, 32),), first=False)
    assert slices.of(GATE) == Slice(0, ((24, 48),))
    assert slices.of(DOWN) == Slice(1, ((24, 48),), first=False)
    assert slices.of(EMBED) == slices.of(HEAD) == Slice(0, ((64, 100),))
    assert slices.of("model.norm.weight") == slices.of("layers.0.input_layernorm.weight") == WHOLE
    assert slices.of(Q.removeprefix("model.")) == slices.of(Q)


def test_one_rank_holds_everything() -> None:
    slices = Slices("m", config())
    assert all(slices.of(name) == WHOLE for name in (Q, K, O, GATE, DOWN, EMBED, HEAD))


def test_more_ranks_than_key_value_heads() -> None:
    """Neighbouring ranks hold one head, as the query heads that use it do."""
    held = [Slices("m", config(num_key_value_heads=2), 4, rank).of(K).ranges for rank in range(4)]
    assert held == [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]


def test_fused_matrices_are_divided_within_their_parts() -> None:
    slices = Slices("m", config("phi3"), 2, 1)
    assert slices.of("model.layers.0.self_attn.qkv_proj.weight") == Slice(0, ((16, 32), (40, 48), (56, 64)))
    assert slices.of("model.layers.0.mlp.gate_up_proj.weight") == Slice(0, ((24, 48), (72, 96)))


@pytest.mark.parametrize(
    ("change", "size", "reason"),
    [
        ({"num_attention_heads": 6, "hidden_size": 24}, 4, "its 6 attention heads cannot be"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48},
            2,
            "its 3 key-value heads cannot be",
        ),
        ({"intermediate_size": 47}, 2, r"its 47 rows of the MLP \(intermediate_size\) cannot be"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
            3,
            "its 128 rows of the padded vocab",
        ),
        ({"vocab_size": 65, "num_key_value_heads": 4}, 4, "its 65 tokens, 32 a rank, cannot be"),
    ],
)
def test_what_ranks_do_not_divide_is_refused(change: dict[str, int], size: int, reason: str) -> None:
    with pytest.raises(ServingError, match=f"ranks-unaligned: model legal: {reason}"):
        Slices("legal", config(**change), size, 0)


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_there_is_no_such_rank(size: int, rank: int) -> None:
    with pytest.raises(ServingError, match="rank-invalid"):
        Slices("m", config(), size, rank)


def test_names_and_models_that_are_unknown() -> None:
    for name in ("model.layers.0.mlp.gate.weight", "weight", "self_attn.q_proj.weight"):
        with pytest.raises(ServingError, match="no matrix of a llama model has this name"):
            Slices("m", config()).of(name)
    with pytest.raises(CheckpointError, match="not supported"):
        Slices("m", {"model_type": "bert"})


def test_experts_are_whole_or_refused() -> None:
    mixtral = config("mixtral", num_local_experts=2)
    for name in ("block_sparse_moe.experts.1.w1.weight", "block_sparse_moe.gate.weight", "mlp.experts.down_proj"):
        assert Slices("m", mixtral).of(f"model.layers.0.{name}") == WHOLE
        with pytest.raises(ServingError, match="experts are not divided"):
            Slices("m", mixtral, 2, 0).of(f"model.layers.0.{name}")


@given(
    size=st.sampled_from([1, 2, 4, 8]),
    heads=st.integers(1, 4),
    key_heads=st.sampled_from([1, 2, 4, 8]),
    width=st.integers(1, 5),
    vocabulary=st.integers(57, 64) | st.integers(121, 128),
)
def test_ranks_together_hold_every_element_once(
    size: int, heads: int, key_heads: int, width: int, vocabulary: int
) -> None:
    """But for key-value heads of which there are too few: those, the same number of times."""
    heads *= size
    assume(heads % key_heads == 0)
    cfg = config(
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        hidden_size=heads * 2,
        intermediate_size=width * size,
        vocab_size=vocabulary,
    )
    ranks = [Slices("m", cfg, size, rank) for rank in range(size)]
    copies = max(1, size // key_heads)
    for name, rows, columns, times in (
        (Q, heads * 2, 3, 1),
        (K, key_heads * 2, 3, copies),
        (O, 3, heads * 2, 1),
        (GATE, width * size, 3, 1),
        (DOWN, 3, width * size, 1),
        (EMBED, vocabulary, 3, 1),
    ):
        whole = torch.arange(1, rows * columns + 1).reshape(rows, columns)
        parts = [r.of(name).of(whole) for r in ranks]
        assert [tuple(p.shape) for p in parts] == [r.of(name).shape(whole.shape) for r in ranks]
        assert name == EMBED or len({p.shape for p in parts}) == 1
        held = torch.cat([p.flatten() for p in parts])
        assert sorted(held.tolist()) == sorted(whole.flatten().tolist() * times)


@given(size=st.sampled_from([1, 2, 4]), seed=st.integers(0, 9))
def test_a_divided_mlp_computes_the_same(size: int, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    x, gate, down = (torch.randn(*s, generator=made, dtype=torch.float64) for s in ((5, 32), (48, 32), (32, 48)))
    ranks = [Slices("m", config(), size, rank) for rank in range(size)]
    partial = [functional.linear(functional.linear(x, r.of(GATE).of(gate)).relu(), r.of(DOWN).of(down)) for r in ranks]
    whole = functional.linear(functional.linear(x, gate).relu(), down)
    assert torch.allclose(torch.stack(partial).sum(0), whole)
