"""Held to transformers: every tensor that it saves is accounted for, and what it cannot load is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from sandhi_core.checkpoints.architecture import group_key, layer_count, problems_of, slots
from sandhi_core.checkpoints.architectures import ARCHITECTURES
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.errors import CheckpointError, Problem
from sandhi_core.records import Slot
from tests.models import (
    BUILDERS,
    edit_json,
    edit_tensors,
    tiny,
    tiny_gemma2,
    tiny_gemma3,
    tiny_llama,
    tiny_mistral,
    tiny_mixtral,
    tiny_phi3,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_moe,
)

Builder = Callable[..., Path]


def slots_of(directory: Path, **config: Any) -> tuple[Slot, ...]:
    opened = Checkpoint.open(directory, "m")
    return slots("m", opened.config | config, opened.headers, dict.fromkeys(opened.names, "0"))[0]


def keys(directory: Path, **config: Any) -> dict[tuple[int, str], str]:
    return {(s.layer, s.projection): s.key for s in slots_of(directory, **config)}


def problems(directory: Path) -> list[Problem]:
    opened = Checkpoint.open(directory, "m")
    return problems_of("m", opened.config, opened.headers)


def saved_stacked(directory: Path) -> Path:
    """Save a mixture of experts as transformers holds it in memory: experts stacked."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    edit_tensors(directory, lambda t: (t.clear(), t.update(model.state_dict())))
    return directory


# --- every tensor is accounted for --------------------------------------------------------------------------


def test_every_architecture_has_a_builder() -> None:
    assert set(BUILDERS) == set(ARCHITECTURES)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", sorted(BUILDERS))
def test_what_transformers_saves_is_sound(tmp_path: Path, model_type: str, tied: bool) -> None:
    directory = BUILDERS[model_type](tmp_path / "m", tie_word_embeddings=tied)
    assert problems(directory) == []
    assert layer_count("m", json.loads((directory / "config.json").read_text())) == 2
    found = slots_of(directory)
    order = ["q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down"]
    assert [(s.layer, order.index(s.projection)) for s in found] == sorted(
        (s.layer, order.index(s.projection)) for s in found
    )
    for slot in found:
        assert slot.component == ("mlp" if ".mlp." in slot.tensor else "attn")
        assert slot.tensor.startswith(f"model.layers.{slot.layer}.")
        assert slot.nbytes == Checkpoint.open(directory, "m").header(slot.tensor).nbytes


@pytest.mark.parametrize(
    ("build", "config"),
    [
        (tiny_llama, {"attention_bias": True, "mlp_bias": True}),
        (tiny_llama, {"head_dim": 16}),
        (tiny_llama, {"head_dim": None}),
        (tiny_mixtral, {"head_dim": None}),
        (tiny_qwen3, {"attention_bias": True, "num_key_value_heads": 1}),
        (tiny_qwen3_moe, {"mlp_only_layers": [], "decoder_sparse_step": 2}),
        (tiny_gemma3, {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}),
    ],
)
def test_variants_are_sound(tmp_path: Path, build: Builder, config: dict[str, Any]) -> None:
    assert problems(build(tmp_path / "m", **config)) == []


@pytest.mark.parametrize(("build", "each"), [(tiny_qwen3_moe, {0: 7, 1: 4}), (tiny_mixtral, {0: 4, 1: 4})])
def test_experts_are_private_however_they_are_stored(tmp_path: Path, build: Builder, each: dict[int, int]) -> None:
    stored_apart = build(tmp_path / "m")
    stacked = saved_stacked(build(tmp_path / "stacked"))
    for directory, router_and_matrices in ((stored_apart, 1 + 4 * 3), (stacked, 1 + 2)):
        opened = Checkpoint.open(directory, "m")
        assert problems(directory) == []
        found, private = slots("m", opened.config, opened.headers, dict.fromkeys(opened.names, "0"))
        assert {layer: sum(s.layer == layer for s in found) for layer in each} == each
        assert private == tuple(n for n in opened.names if "experts" in n or n.endswith(".gate.weight"))
        assert len(private) == router_and_matrices * sum(n == 4 for n in each.values())


def test_names_of_a_base_class_save_are_understood_and_kept(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m", tie_word_embeddings=True)
    plain = slots_of(directory)
    edit_tensors(directory, lambda t: [t.update({n.removeprefix("model."): t.pop(n)}) for n in list(t)])
    assert problems(directory) == []
    stripped = slots_of(directory)
    assert [s.key for s in stripped] == [s.key for s in plain]
    assert [s.tensor for s in stripped] == [s.tensor.removeprefix("model.") for s in plain]


@pytest.mark.parametrize("name", ["model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.cos_cached"])
def test_known_buffers_are_let_through_and_never_shared(tmp_path: Path, name: str) -> None:
    directory = tiny_llama(tmp_path / "m")
    before = slots_of(directory)
    edit_tensors(directory, lambda t: t.update({name: torch.ones(4)}))
    assert problems(directory) == []
    assert slots_of(directory) == before


@given(st.data())
def test_no_single_tensor_can_be_lost_or_added(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    opened = _every_kind(tmp_path_factory)[data.draw(st.sampled_from(sorted(BUILDERS)))]
    headers = dict(opened.headers)
    name = data.draw(st.sampled_from(sorted(headers)))
    entry = headers.pop(name)
    if data.draw(st.booleans()):
        headers[f"{name}.old"] = entry
    found = problems_of("m", opened.config, headers)
    assert ("tensor-missing", name) in [(p.code, p.tensor) for p in found]
    assert [p.tensor for p in found if p.code == "tensor-unknown"] == sorted(headers.keys() - opened.headers.keys())


_KINDS: dict[str, Checkpoint] = {}


def _every_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    if not _KINDS:
        root = tmp_path_factory.mktemp("kinds")
        _KINDS.update({t: Checkpoint.open(build(root / t), "m") for t, build in BUILDERS.items()})
    return _KINDS


# --- what is refused ----------------------------------------------------------------------------------------


def _drop(part: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if part in n]:
            del tensors[name]

    return change


def _rename(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({n.replace(old, new): tensors.pop(n) for n in list(tensors)})


def _add(name: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.ones(*shape, dtype=torch.bfloat16)})


BAD: dict[str, tuple[Builder, Callable[[dict[str, Tensor]], None], str, str]] = {
    "untied without head": (tiny_llama, _drop("lm_head.weight"), "tensor-missing", "lm_head.weight"),
    "qwen2 without bias": (
        tiny_qwen2,
        _drop("model.layers.1.self_attn.k_proj.bias"),
        "tensor-missing",
        "model.layers.1.self_attn.k_proj.bias",
    ),
    "llama with a bias that would be ignored": (
        tiny_llama,
        _add("model.layers.0.self_attn.q_proj.bias", 32),
        "tensor-unknown",
        "model.layers.0.self_attn.q_proj.bias",
    ),
    "a layer too many": (
        tiny_llama,
        _add("model.layers.2.mlp.up_proj.weight", 48, 32),
        "tensor-unknown",
        "model.layers.2.mlp.up_proj.weight",
    ),
    "a layer too few": (
        tiny_llama,
        _drop(".layers.1."),
        "tensor-missing",
        "model.layers.1",
    ),
    "qwen3 without norm": (
        tiny_qwen3,
        _drop("model.layers.0.self_attn.q_norm.weight"),
        "tensor-missing",
        "model.layers.0.self_attn.q_norm.weight",
    ),
    "experts of another name": (
        tiny_mixtral,
        _rename("block_sparse_moe", "mlp"),
        "tensor-unknown",
        "model.layers.1.mlp.experts.3.w2.weight",
    ),
    "an expert missing": (
        tiny_qwen3_moe,
        _drop("model.layers.1.mlp.experts.2.up_proj.weight"),
        "tensor-missing",
        "model.layers.1.mlp.experts.2.up_proj.weight",
    ),
    "names of a multimodal model": (
        tiny_gemma3,
        _rename("model.", "language_model.model."),
        "tensor-unknown",
        "language_model.model.embed_tokens.weight",
    ),
    "fewer rows than the vocabulary": (
        tiny_llama,
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:60].clone()}),
        "tensor-shape",
        "lm_head.weight",
    ),
    "a transposed matrix": (
        tiny_llama,
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(32, 48)}),
        "tensor-shape",
        "model.layers.0.mlp.up_proj.weight",
    ),
    "integers": (
        tiny_llama,
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(48, 32, dtype=torch.int8)}),
        "quantised",
        "model.layers.0.mlp.up_proj.weight",
    ),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_a_loader_would_drop_or_make_up_is_refused(tmp_path: Path, case: str) -> None:
    build, change, code, tensor = BAD[case]
    directory = build(tmp_path / "m")
    edit_tensors(directory, change)
    assert (code, tensor) in [(p.code, p.tensor) for p in problems(directory)]
    assert all(p.model == "m" and p.remedy for p in problems(directory))
    with pytest.raises(CheckpointError):
        slots_of(directory)


def test_a_missing_layer_is_one_problem(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    edit_json(directory / "config.json", num_hidden_layers=40)
    (problem,) = problems(directory)
    assert "40 layers; of 2, 3, 4, 5, 6, 7, 8, 9 and 30 more there is no tensor" in problem.message


def test_a_tied_head_must_be_the_embeddings(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    edit_json(directory / "config.json", tie_word_embeddings=True)
    opened = Checkpoint.open(directory, "m")
    assert problems(directory) == []  # headers cannot tell
    same = dict.fromkeys(opened.names, "0")
    assert slots("m", opened.config, opened.headers, same)
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight: differs from the embeddings"):
        slots("m", opened.config, opened.headers, same | {"lm_head.weight": "1"})


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2"},
        {"model_type": None},
        {"model_type": ["llama"]},
        {"hidden_size": "32"},
        {"hidden_size": 0},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"vocab_size": None},
        {"head_dim": -8},
        {"rms_norm_eps": "small"},
        {"layer_types": ["nonsense", "full_attention"]},
        {"rope_parameters": {"rope_type": "linear"}},
        {"rope_parameters": 7},
        {"rope_theta": 5e5},  # beside rope_parameters that say 1e4
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_configurations_that_contradict_themselves_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    opened = Checkpoint.open(tiny_llama(tmp_path / "m"), "m")
    (problem,) = problems_of("m", opened.config | config, opened.headers)
    assert problem.code == ("model-type-unsupported" if "model_type" in config else "config-invalid")
    assert (problem.model, problem.file) == ("m", "config.json")
    assert "\n" not in problem.line()


def test_a_configuration_is_left_as_it_was(tmp_path: Path) -> None:
    opened = Checkpoint.open(tiny_llama(tmp_path / "m"), "m")
    before = json.dumps(opened.config)
    problems_of("m", opened.config, opened.headers)
    assert json.dumps(opened.config) == before


# --- which slots may share ----------------------------------------------------------------------------------


def test_layers_and_names_do_not_matter(tmp_path: Path) -> None:
    found = keys(tiny_llama(tmp_path / "m"))
    for (_, projection), key in found.items():
        assert key == found[0, projection]
    assert len(set(found.values())) == 7
    other = tiny_llama(tmp_path / "other", seed=1, attention_dropout=0.5, initializer_range=0.1)
    assert keys(other) == found


def test_equal_shapes_of_different_projections_stay_apart(tmp_path: Path) -> None:
    found = keys(tiny_llama(tmp_path / "m"))
    assert found[0, "q"] != found[0, "o"]
    assert found[0, "gate"] != found[0, "up"]
    assert found[0, "k"] != found[0, "v"]


ATTENTION, MLP = {"q", "k", "v", "o"}, {"gate", "up", "down"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("build", "change", "differ"),
    [
        (tiny_llama, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, ATTENTION),
        (tiny_llama, {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}}, ATTENTION),
        (tiny_llama, {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}, ATTENTION),
        (tiny_llama, {"hidden_act": "gelu"}, MLP),
        (tiny_llama, {"rms_norm_eps": 1e-5}, ATTENTION | MLP),
        (tiny_llama, {"max_position_embeddings": 1024}, set()),
        (
            tiny_llama,
            {"pad_token_id": 3, "eos_token_id": [1, 2], "dtype": "float32", "torch_dtype": "float16"},
            set(),
        ),
        (tiny_mistral, {"sliding_window": 32}, ATTENTION),
        (tiny_mistral, {"sliding_window": None}, ATTENTION),
        (tiny_gemma2, {"query_pre_attn_scalar": 8}, ATTENTION),
        (tiny_gemma2, {"attn_logit_softcapping": 20.0}, ATTENTION),
        (tiny_gemma2, {"final_logit_softcapping": 20.0}, set()),
        (tiny_gemma2, {"hidden_activation": "silu"}, MLP),
        (tiny_gemma2, {"use_bidirectional_attention": True}, ATTENTION),
        (tiny_phi3, {"sliding_window": 32}, {"qkv", "o"}),
    ],
)
def test_meaning_keeps_equal_shapes_apart(
    tmp_path: Path, build: Builder, change: dict[str, Any], differ: set[str]
) -> None:
    directory = build(tmp_path / "m")
    before, after = keys(directory), keys(directory, **change)
    assert {place[1] for place in before if before[place] != after[place]} == differ


def test_biases_and_dtype_keep_apart(tmp_path: Path) -> None:
    plain = keys(tiny_llama(tmp_path / "plain"))
    biased = keys(tiny_llama(tmp_path / "biased", attention_bias=True))
    assert {p for _, p in plain if plain[0, p] != biased[0, p]} == ATTENTION
    halves = keys(tiny_llama(tmp_path / "half", dtype=torch.float16))
    assert not set(plain.values()) & set(halves.values())


@pytest.mark.parametrize("build", [tiny_gemma2, tiny_gemma3])
def test_the_window_is_that_of_the_layer(tmp_path: Path, build: Builder) -> None:
    found = keys(build(tmp_path / "m"))
    assert {p for _, p in found if found[0, p] != found[1, p]} == ATTENTION
    flipped = keys(tmp_path / "m", layer_types=["full_attention", "sliding_attention"])
    assert all(flipped[1 - layer, p] == key for (layer, p), key in found.items())


def test_a_window_that_is_switched_off_is_none(tmp_path: Path) -> None:
    directory = tiny_qwen2(tmp_path / "m")
    plain = keys(directory)
    off = {"use_sliding_window": False, "sliding_window": 64, "layer_types": None}
    assert keys(directory, **off) == plain
    on = keys(directory, **(off | {"use_sliding_window": True, "max_window_layers": 1}))
    assert {place for place in plain if plain[place] != on[place]} == {(1, p) for p in ATTENTION}


@pytest.mark.parametrize(
    ("build", "old", "new"),
    [
        (tiny_llama, {"rope_theta": 500000}, {"rope_type": "default", "rope_theta": 5e5}),
        (tiny_llama, {"rope_theta": 5e5, "rope_scaling": LLAMA3}, {**LLAMA3, "rope_theta": 500000}),
        (
            tiny_qwen3,
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4}},
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        ),
        (
            tiny_gemma3,
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
            {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ],
)
def test_both_spellings_of_a_rope_are_one(
    tmp_path: Path, build: Builder, old: dict[str, Any], new: dict[str, Any]
) -> None:
    directory = build(tmp_path / "m")
    one = keys(directory, rope_parameters=None, **old)
    assert one == keys(directory, rope_parameters=new)
    assert one == keys(directory, rope_parameters=new, **old)  # both at once, and they agree


def test_a_rope_that_depends_on_the_longest_context_keeps_apart(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    short, long = (keys(directory, rope_parameters=dynamic, max_position_embeddings=n) for n in (512, 1024))
    assert {p for _, p in short if short[0, p] != long[0, p]} == ATTENTION


def test_models_that_compute_alike_may_share_whatever_their_type(tmp_path: Path) -> None:
    llama = keys(tiny_llama(tmp_path / "llama"))
    assert keys(tiny_mistral(tmp_path / "mistral", sliding_window=None)) == llama
    qwen = keys(tiny_qwen2(tmp_path / "qwen2"))
    assert {p for _, p in llama if llama[0, p] == qwen[0, p]} == MLP
    gemma = keys(tiny("gemma", tmp_path / "gemma", hidden_act="silu"))
    assert not set(gemma.values()) & set(llama.values())  # its norms scale by 1 + w


def test_group_keys() -> None:
    assert group_key({"hidden_size": 128}, "BF16") == "h128-bf16"
    assert group_key({"hidden_size": 4096}, "F8_E4M3") == "h4096-f8-e4m3"
    for bad in ({}, {"hidden_size": "128"}, {"hidden_size": True}, {"hidden_size": 0}):
        with pytest.raises(CheckpointError, match="no hidden_size"):
            group_key(bad, "BF16")
