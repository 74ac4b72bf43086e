"""What each supported architecture is made of, as data: modules of a decoder layer, shapes, biases.

A dimension is a letter (or a product of one): H hidden size, I width of the MLP, Q and K all query and all
key heads together, D one head, V vocabulary, E experts, M width of an expert. A fused matrix stays one
projection: its rows are never taken apart, because orders differ between architectures with equal shapes.
The modules, biases and defaults are those of transformers' modelling code for the model type.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Dims = tuple[str, ...]
Matrix = tuple[str, str, str]  # projection, rows, columns


@dataclass(frozen=True)
class Experts:
    """One way of storing a layer's experts: a router, and matrices an expert (`separate`, `{}` is its number)
    or for all experts at once (`stacked`). Names are below the layer; none are shared by search."""

    router: str
    separate: Mapping[str, Dims]
    stacked: Mapping[str, Dims]


@dataclass(frozen=True)
class Architecture:
    """A decoder layer. `biases` lists modules with a bias, under the configuration's flag for them (None:
    always there). `norm` tells apart norms that scale by w and by 1 + w; `scaled`: embeddings are multiplied by the
    root of the hidden size; `partial_rope`: the rope may turn a part of each head only."""

    attention: Mapping[str, Matrix]
    mlp: Mapping[str, Matrix]
    norms: Mapping[str, Dims]
    biases: tuple[tuple[str | None, tuple[str, ...]], ...] = ()
    norm: Literal["w", "1+w"] = "w"
    activation: str = "hidden_act"  # the configuration's name for it
    experts: tuple[Experts, ...] = ()
    scaled: bool = False
    partial_rope: bool = False


ORDER = ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down")
"""Projections in the order of a layer's slots."""

_ATTENTION: dict[str, Matrix] = {
    "self_attn.q_proj": ("q", "Q", "H"),
    "self_attn.k_proj": ("k", "K", "H"),
    "self_attn.v_proj": ("v", "K", "H"),
    "self_attn.o_proj": ("o", "H", "Q"),
}
_MLP: dict[str, Matrix] = {
    "mlp.gate_proj": ("gate", "I", "H"),
    "mlp.up_proj": ("up", "I", "H"),
    "mlp.down_proj": ("down", "H", "I"),
}
_NORMS: dict[str, Dims] = {"input_layernorm": ("H",), "post_attention_layernorm": ("H",)}
_QK_NORMS: dict[str, Dims] = {"self_attn.q_norm": ("D",), "self_attn.k_norm": ("D",)}
_SANDWICH: dict[str, Dims] = {"pre_feedforward_layernorm": ("H",), "post_feedforward_layernorm": ("H",)}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION_BIAS = ("attention_bias", tuple(_ATTENTION))
_STACKED: dict[str, Dims] = {
    "mlp.experts.gate_up_proj": ("E", "2M", "H"),
    "mlp.experts.down_proj": ("E", "H", "M"),
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_ATTENTION, _MLP, _NORMS, (_ATTENTION_BIAS, ("mlp_bias", tuple(_MLP)))),
    "mistral": Architecture(_ATTENTION, _MLP, _NORMS),
    "qwen2": Architecture(_ATTENTION, _MLP, _NORMS, ((None, _QKV),)),
    "qwen3": Architecture(_ATTENTION, _MLP, _NORMS | _QK_NORMS, (_ATTENTION_BIAS,)),
    "gemma": Architecture(_ATTENTION, _MLP, _NORMS, (_ATTENTION_BIAS,), norm="1+w", scaled=True),
    "gemma2": Architecture(
        _ATTENTION,
        _MLP,
        _NORMS | _SANDWICH,
        (_ATTENTION_BIAS,),
        norm="1+w",
        activation="hidden_activation",
        scaled=True,
    ),
    "gemma3_text": Architecture(
        _ATTENTION,
        _MLP,
        _NORMS | _SANDWICH | _QK_NORMS,
        (_ATTENTION_BIAS,),
        norm="1+w",
        activation="hidden_activation",
        scaled=True,
    ),
    "phi3": Architecture(
        {"self_attn.qkv_proj": ("qkv", "Q+2K", "H"), "self_attn.o_proj": ("o", "H", "Q")},
        {"mlp.gate_up_proj": ("gate_up", "2I", "H"), "mlp.down_proj": ("down", "H", "I")},
        _NORMS,
        partial_rope=True,
    ),
    "qwen3_moe": Architecture(
        _ATTENTION,
        _MLP,
        _NORMS | _QK_NORMS,
        (_ATTENTION_BIAS,),
        experts=(
            Experts(
                "mlp.gate",
                {
                    "mlp.experts.{}.gate_proj": ("M", "H"),
                    "mlp.experts.{}.up_proj": ("M", "H"),
                    "mlp.experts.{}.down_proj": ("H", "M"),
                },
                {},
            ),
            Experts("mlp.gate", {}, _STACKED),
        ),
    ),
    "mixtral": Architecture(
        _ATTENTION,
        {},
        _NORMS,
        experts=(
            Experts(
                "block_sparse_moe.gate",
                {
                    "block_sparse_moe.experts.{}.w1": ("M", "H"),
                    "block_sparse_moe.experts.{}.w2": ("H", "M"),
                    "block_sparse_moe.experts.{}.w3": ("M", "H"),
                },
                {},
            ),
            Experts("mlp.gate", {}, _STACKED),
        ),
    ),
}
