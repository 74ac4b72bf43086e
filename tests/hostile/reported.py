"""Checkpoints of public reports that must be refused, made from scratch, by number and bug."""

import torch

from tests.hostile.broken import (
    CONFIG,
    FIRST,
    LFS,
    MISSING,
    NONE_SUCH,
    RESAVE,
    SECOND,
    UNQUANTISED,
    UP,
    Q,
    Refused,
    add,
    config,
    cut,
    drop,
    forget,
    fused,
    gone,
    indexed,
    made,
    pickled,
    prefixed,
    quantised,
    renamed,
    snapshot,
    stale,
    tensors,
    text,
)
from tests.models import (
    INDEX,
    WEIGHTS,
    shard,
    tiny_gemma3,
    tiny_llama,
    tiny_mixtral,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_moe,
)

REPORTED: dict[str, Refused] = {
    "1 transformers#42612": Refused(
        made(tiny_llama, config(tie_word_embeddings=True)), ("head-differs",), WEIGHTS,
        "differs from the embeddings, but config.json ties the two", "set tie_word_embeddings to false",
        "lm_head.weight",
    ),
    "2 vllm#53020": Refused(
        made(tiny_llama, drop("lm_head")), ("tensor-missing",), WEIGHTS,
        f"is missing (config.json does not tie it to the embeddings): {MISSING}", RESAVE, "lm_head.weight",
    ),
    "6 vllm#15031": Refused(
        made(tiny_gemma3, prefixed("language_model.")), ("tensor-unknown",), WEIGHTS, NONE_SUCH, RESAVE,
        "language_model.model.embed_tokens.weight",
    ),
    "7 mergekit#398": Refused(
        made(tiny_qwen3, drop("layers.1.self_attn.k_norm")), ("tensor-missing",), WEIGHTS, MISSING, RESAVE,
        "model.layers.1.self_attn.k_norm.weight",
    ),
    "8 ANEForge#253, biases dropped": Refused(
        made(tiny_qwen2, drop(".bias")), ("tensor-missing",), WEIGHTS, MISSING, RESAVE,
        "model.layers.0.self_attn.k_proj.bias",
    ),
    "8 candle-vllm#167, a bias ignored": Refused(
        made(tiny_llama, add(**{Q.replace("weight", "bias"): torch.ones(32)})), ("tensor-unknown",), WEIGHTS,
        "is a bias that a llama model with this config.json does not have", RESAVE, Q.replace("weight", "bias"),
    ),
    "11 peft#894": Refused(
        made(tiny_llama, drop("layers.1.")), ("tensor-missing",), WEIGHTS,
        "config.json says 2 layers; of 1 there is no tensor", RESAVE, "model.layers.1",
    ),
    "14 DeepSpeed#8345, two ropes": Refused(
        made(tiny_llama, config(rope_theta=5e5)), ("config-invalid",), CONFIG,
        "but the older fields say", "correct it",
    ),
    "17 sglang#34529": Refused(
        made(tiny_llama, tensors(fused)), ("tensor-missing", "tensor-unknown"), WEIGHTS, MISSING, RESAVE, Q,
    ),
    "18 vllm#36997, half of the experts stacked": Refused(
        made(tiny_qwen3_moe, drop("experts.3.")), ("tensor-missing",), WEIGHTS, MISSING, RESAVE,
        "model.layers.1.mlp.experts.3.down_proj.weight",
    ),
    "19 MoE-Infinity#109": Refused(
        made(tiny_mixtral, renamed("block_sparse_moe", "mlp")), ("tensor-missing", "tensor-unknown"), WEIGHTS, MISSING,
        RESAVE, "model.layers.0.block_sparse_moe.gate.weight",
    ),
    "25 mergekit#73": Refused(
        made(tiny_llama, tensors(lambda t: t["lm_head.weight"][63].fill_(float("nan")))), ("not-finite",), WEIGHTS,
        "row 63", "", "lm_head.weight",
    ),
    "29 mlx-vlm#1464": Refused(
        made(tiny_llama, shard, stale), ("weights-ambiguous",), WEIGHTS, "loaders disagree which of them is the model",
        "remove the one that is stale",
    ),
    "30 sglang#32279, a shard forgotten": Refused(
        made(tiny_llama, shard, indexed(forget)), ("weights-stray", "tensor-missing"), SECOND,
        "do not belong to the model", "move it",
    ),
    "30 CoSER#3, a shard missing": Refused(
        made(tiny_llama, shard, gone(SECOND)), ("shard-missing",), SECOND, f"is missing, but {INDEX} names it",
        "download it again",
    ),
    "31 huggingface_hub#4728": Refused(
        made(tiny_llama, shard, indexed(lambda m: m.update({"model.norm.weight": FIRST}))), ("index-mismatch",), SECOND,
        f"says that it is in {FIRST}", RESAVE, "model.norm.weight",
    ),
    "34 rank_llm#398": Refused(
        made(tiny_llama, pickled("pytorch_model.bin")), ("pickle-only",), "pytorch_model.bin",
        "can run code when it is read", "convert it to safetensors",
    ),
    "35 OmniParser#34": Refused(
        made(tiny_llama, text(WEIGHTS, LFS)), ("lfs-pointer",), WEIGHTS, "is a Git LFS pointer", "git lfs pull"
    ),
    "36 InvokeAI#7009": Refused(
        made(tiny_llama, cut(WEIGHTS, 100)), ("file-damaged",), WEIGHTS, "the file has", "download it again"
    ),
    "41 kubernetes-manifests#2517": Refused(
        made(tiny_llama, snapshot), ("link-dangling",), WEIGHTS, "is a link to a file that is gone", "download it again"
    ),
    "47 peft#1001": Refused(
        made(tiny_llama, tensors(lambda t: t[UP][5, 3].fill_(float("-inf")))), ("not-finite",), WEIGHTS, "row 5", "", UP
    ),
    "48 llama.cpp#12923": Refused(
        made(tiny_llama, quantised({"weight": torch.ones(48, 32, dtype=torch.uint8), "SCB": torch.ones(48)})),
        ("quantised",), WEIGHTS, "quantised weights cannot be averaged", UNQUANTISED, UP.replace("weight", "SCB"),
    ),
}  # fmt: skip
