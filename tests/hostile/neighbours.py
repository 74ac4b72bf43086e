"""Neighbours of the checkpoints of public reports (reported.py): other spellings of the same mistakes."""

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from tests.hostile.broken import (
    CONFIG,
    FIRST,
    I32,
    LFS,
    MISSING,
    NONE_SUCH,
    RESAVE,
    SECOND,
    SHOUTED,
    SOURCE,
    U8,
    UNKNOWN,
    UNQUANTISED,
    UP,
    Refused,
    config,
    drop,
    fused,
    header,
    indexed,
    made,
    moved,
    other,
    peft,
    prefixed,
    quantised,
    renamed,
    tensors,
    text,
)
from tests.models import INDEX, SIZE, WEIGHTS, shard, tiny_gemma3, tiny_llama, tiny_mixtral, tiny_phi3

NEIGHBOURS: dict[str, Refused] = {
    **{
        f"prefix {prefix}": Refused(
            made(tiny_llama, prefixed(prefix)), ("tensor-unknown",), WEIGHTS, NONE_SUCH, RESAVE,
            f"{prefix}lm_head.weight",
        )
        for prefix in ("base_model.model.", "_orig_mod.", "module.", "transformer.")
    },
    "layers of another family": Refused(
        made(tiny_llama, renamed("layers.", "h.")), ("tensor-unknown",), WEIGHTS, NONE_SUCH, RESAVE, "lm_head.weight"
    ),
    **{
        f"fused as {name}": Refused(
            made(tiny_llama, tensors(fused), renamed("query_key_value", name)), ("tensor-missing", "tensor-unknown"),
            WEIGHTS, UNKNOWN, RESAVE, f"model.layers.0.self_attn.{name}.weight",
        )
        for name in ("qkv_proj", "Wqkv", "query_key_value", "c_attn")
    },
    "gate and up fused in a llama": Refused(
        made(tiny_llama, drop("gate_proj"), renamed("up_proj", "gate_up_proj")), ("tensor-missing", "tensor-unknown"),
        WEIGHTS, UNKNOWN, RESAVE, "model.layers.0.mlp.gate_up_proj.weight",
    ),
    "phi3 taken apart": Refused(
        made(tiny_phi3, renamed("qkv_proj", "q_proj")), ("tensor-missing", "tensor-unknown"), WEIGHTS, MISSING, RESAVE,
        "model.layers.0.self_attn.qkv_proj.weight",
    ),
    "transposed as Conv1D": Refused(
        made(tiny_llama, tensors(lambda t: t.update({UP: t[UP].T.contiguous()}))), ("tensor-shape",), WEIGHTS,
        "has shape (32, 48), but config.json asks for (48, 32)", "use the config.json that belongs", UP,
    ),
    "gpt2": Refused(
        other("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64),
        ("model-type-unsupported",), CONFIG,
        "names model type 'gpt2', which is not supported", "supported are llama",
    ),
    "gpt_neox": Refused(
        other("gpt_neox", **SIZE), ("model-type-unsupported",), CONFIG, "'gpt_neox'", "leave this model out"
    ),
    "an encoder": Refused(
        other("bert", AutoModel, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
              vocab_size=64),
        ("model-type-unsupported",), CONFIG, "'bert'", "leave this model out",
    ),
    "a vision model": Refused(
        other("vit", AutoModel, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
              image_size=32),
        ("model-type-unsupported",), CONFIG, "'vit'", "leave this model out",
    ),
    "an encoder and a decoder": Refused(
        other("t5", AutoModel, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64),
        ("model-type-unsupported",), CONFIG, "'t5'", "leave this model out",
    ),
    "a model of text and pictures": Refused(
        made(tiny_gemma3, prefixed("language_model."), config(model_type="gemma3")),
        ("model-type-unsupported",), CONFIG,
        "'gemma3'", "gemma3_text",
    ),
    "code of its own": Refused(
        made(tiny_llama, config(model_type="own", auto_map={"AutoModelForCausalLM": "own.Own"})),
        ("model-type-unsupported",), CONFIG, "'own'", "leave this model out",
    ),
    "GPTQ": Refused(
        made(tiny_llama, quantised({"qweight": I32(), "qzeros": I32(), "scales": torch.ones(4), "g_idx": I32()},
                                   "gptq")),
        ("quantised",), CONFIG, "has a quantization_config", UNQUANTISED,
    ),
    "AWQ": Refused(
        made(tiny_llama, quantised({"qweight": I32(), "qzeros": I32(), "scales": torch.ones(4)})),
        ("quantised",), WEIGHTS, "is part of quantised weights", UNQUANTISED, UP.replace("weight", "qweight"),
    ),
    "bitsandbytes, four bits": Refused(
        made(tiny_llama, quantised({"weight": U8(), "weight.absmax": torch.ones(4), "weight.quant_map": torch.ones(16),
                                    "weight.quant_state.bitsandbytes__nf4": torch.ones(4)})),
        ("quantised",), WEIGHTS, "is part of quantised weights", UNQUANTISED, f"{UP}.absmax",
    ),
    "FP8 with scales": Refused(
        made(tiny_llama, quantised({"weight": torch.ones(48, 32).to(torch.float8_e4m3fn),
                                    "weight_scale_inv": torch.ones(1)})),
        ("quantised",), WEIGHTS, "is part of quantised weights", UNQUANTISED, f"{UP}_scale_inv",
    ),
    "MXFP4": Refused(
        made(tiny_llama, quantised({"weight_blocks": U8(), "weight_scales": U8()})),
        ("quantised",), WEIGHTS, "is part of quantised weights", UNQUANTISED, f"{UP}_blocks",
    ),
    "compressed-tensors": Refused(
        made(tiny_llama, quantised({"weight_packed": I32(), "weight_scale": torch.ones(4), "weight_shape": I32()},
                                   "compressed-tensors")),
        ("quantised",), WEIGHTS, "is part of quantised weights", UNQUANTISED, f"{UP}_packed",
    ),
    "HQQ": Refused(
        made(tiny_llama, quantised({"W_q": U8(), "meta": torch.ones(4), "zero": torch.ones(4),
                                    "scale": torch.ones(4)})),
        ("quantised",), WEIGHTS, "is part of quantised weights", UNQUANTISED, UP.replace("weight", "W_q"),
    ),
    "torchao and quanto": Refused(
        made(tiny_llama, quantised({"weight._data": torch.ones(48, 32, dtype=torch.int8),
                                    "weight._scale": torch.ones(48)})),
        ("quantised",), WEIGHTS, "is part of quantised weights", UNQUANTISED, f"{UP}._data",
    ),
    **{
        f"only {name}": Refused(
            made(tiny_llama, moved(WEIGHTS, name)), (code,), file, message, remedy,
        )
        for name, code, file, message, remedy in (
            ("model.gguf", "weights-missing", WEIGHTS, "there is model.gguf", RESAVE),
            ("flax_model.msgpack", "weights-missing", WEIGHTS, "there is flax_model.msgpack", RESAVE),
            ("tf_model.h5", "weights-missing", WEIGHTS, "there is tf_model.h5", RESAVE),
            ("model.pt", "pickle-only", "model.pt", "as a pickle", "convert it"),
            ("consolidated.00.pth", "pickle-only", "consolidated.00.pth", "as a pickle", "convert it"),
            ("consolidated.safetensors", "weights-missing", "consolidated.safetensors", "no name that loaders look for",
             "name a single file"),
        )
    },
    "a PEFT directory": Refused(
        peft, ("adapter-only",), "adapter_config.json", "describes an adapter (LoRA), not a whole model",
        "merge_and_unload",
    ),
    "a path that leads out": Refused(
        made(tiny_llama, shard, indexed(lambda m: m.update({"model.norm.weight": "../../etc/x.safetensors"}))),
        ("index-invalid", "index-mismatch"), INDEX, "names the shard '../../etc/x.safetensors'", RESAVE,
        "model.norm.weight",
    ),
    "a path from the root": Refused(
        made(tiny_llama, shard, indexed(lambda m: m.update({"model.norm.weight": "/etc/x.safetensors"}))),
        ("index-invalid", "index-mismatch"), INDEX, "names the shard '/etc/x.safetensors'", RESAVE, "model.norm.weight",
    ),
    "a tensor in two shards": Refused(
        made(tiny_llama, shard, lambda d: save_file(load_file(d / SECOND) | {"lm_head.weight": torch.ones(64, 32)},
                                                    d / SECOND, metadata={"format": "pt"})),
        ("tensor-duplicated", "index-mismatch"), SECOND, f"is in {FIRST} as well", RESAVE, "lm_head.weight",
    ),
    "an index that is a list": Refused(
        made(tiny_llama, shard, text(INDEX, "[]")), ("index-invalid",), INDEX, "is no JSON object", RESAVE
    ),
    "an index with a name twice": Refused(
        made(tiny_llama, shard, lambda d: (d / INDEX).write_text(
            (d / INDEX).read_text().replace('"weight_map": {', f'"weight_map": {{"model.norm.weight": "{FIRST}",'))),
        ("index-invalid",), INDEX, "'model.norm.weight' stands twice", RESAVE,
    ),
    "names that differ in case alone": Refused(
        made(tiny_llama, shard, indexed(lambda m: m.update({"model.norm.weight": SHOUTED}))),
        ("shard-missing", "index-mismatch"), SHOUTED, "is missing", "download",
    ),
    "a shard without tensors": Refused(
        made(tiny_llama, shard, indexed(lambda m: m.update({"model.extra": "model-00003.safetensors"})),
             lambda d: save_file({}, d / "model-00003.safetensors", metadata={"format": "pt"})),
        ("index-mismatch",), "model-00003.safetensors", "but this shard lacks it", RESAVE, "model.extra",
    ),
    "an empty header": Refused(
        made(tiny_llama, header(b"{}")), ("weights-missing",), WEIGHTS, "holds no tensor at all", "download it again"
    ),
    "a header without end": Refused(
        made(tiny_llama, header(b"{", 2**62)), ("file-damaged",), WEIGHTS, "no header fits", "download it again"
    ),
    "an empty file": Refused(
        made(tiny_llama, text(WEIGHTS, b"")), ("file-damaged",), WEIGHTS, "no header fits into its 0 bytes", "download"
    ),
    "a pointer for the configuration": Refused(
        made(tiny_llama, text(CONFIG, LFS)), ("lfs-pointer",), CONFIG, "is a Git LFS pointer", "git lfs pull"
    ),
    "a pointer for the tokenizer": Refused(
        made(tiny_llama, text("tokenizer.json", LFS)), ("lfs-pointer",), "tokenizer.json", "is a Git LFS pointer",
        "git lfs",
    ),
    "an empty directory": Refused(
        lambda d: d.mkdir(), ("config-missing", "weights-missing", "tokenizer-missing"), CONFIG, "is missing", RESAVE
    ),
    "a file for a directory": Refused(
        lambda d: d.write_text("x"), ("directory-missing",), None, "is no directory", "correct the path"
    ),
    "a configuration that is a list": Refused(
        made(tiny_llama, text(CONFIG, "[]")), ("config-invalid",), CONFIG, "is no JSON object", SOURCE
    ),
    "a configuration that is no UTF-8": Refused(
        made(tiny_llama, text(CONFIG, b'{"model_type": "\xff"}')), ("config-invalid",), CONFIG, "is no JSON", SOURCE
    ),
    "a configuration with a name twice": Refused(
        made(tiny_llama, lambda d: (d / CONFIG).write_text('{"rms_norm_eps": 0.5,' + (d / CONFIG).read_text()[1:])),
        ("config-invalid",), CONFIG, "'rms_norm_eps' stands twice", SOURCE,
    ),
    "a configuration with NaN": Refused(
        made(tiny_llama, lambda d: (d / CONFIG).write_text((d / CONFIG).read_text().replace("1e-06", "NaN"))),
        ("config-invalid",), CONFIG, "NaN", SOURCE,
    ),
    "part of a head turned": Refused(
        made(tiny_llama, config(partial_rotary_factor=0.5)), ("config-invalid",), CONFIG,
        "partial_rotary_factor", "correct it",
    ),
    "no causal mask": Refused(
        made(tiny_llama, config(is_causal=False)), ("config-invalid",), CONFIG,
        "is_causal is switched off", "correct it",
    ),
    "answers as tuples": Refused(
        made(tiny_llama, config(return_dict=False)), ("config-invalid",), CONFIG,
        "return_dict is switched off", "correct it",
    ),
    "a window of no width": Refused(
        made(tiny_gemma3, config(sliding_window=0)),
        ("config-invalid",), CONFIG, "there is no sliding_window", "correct it",
    ),
    "more experts for a token than there are": Refused(
        made(tiny_mixtral, config(num_experts_per_tok=9)), ("config-invalid",), CONFIG, "9 of 4 experts", "correct it"
    ),
    "layers of a kind that nobody knows": Refused(
        made(tiny_llama, config(layer_types=["chunked_attention"] * 2)), ("config-invalid",), CONFIG,
        "layers of 'chunked_attention' are unknown", "correct it",
    ),
}  # fmt: skip
