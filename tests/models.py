"""Tiny random checkpoints of real architectures, as stock transformers writes them, in milliseconds.

`tiny_llama(directory)` and its siblings write config, weights and a character tokenizer; keyword arguments
override the configuration. The helpers below edit a checkpoint's tensors and JSON files in place.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

SPECIAL = ("<unk>", "<s>", "</s>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,:;?!'\"-+=*/()%<>[]_#"
VOCABULARY = 64
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def tiny(
    model_type: str,
    directory: Path,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a checkpoint of any model type of transformers; every parameter is random, biases too."""
    config = AutoConfig.for_model(model_type, **(SIZE | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(directory)
    if tokenizer:
        write_tokenizer(directory)
    return directory


def tiny_llama(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    return tiny("llama", directory, seed, **overrides)


def tiny_mistral(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    return tiny("mistral", directory, seed, **({"sliding_window": 64} | overrides))


def tiny_qwen2(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    return tiny("qwen2", directory, seed, **overrides)


def tiny_qwen3(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    return tiny("qwen3", directory, seed, **overrides)


def tiny_gemma(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    return tiny("gemma", directory, seed, **({"tie_word_embeddings": True} | overrides))


def tiny_gemma2(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    defaults = {"tie_word_embeddings": True, "sliding_window": 64}
    return tiny("gemma2", directory, seed, **(defaults | overrides))


def tiny_gemma3(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    defaults = {
        "tie_word_embeddings": True,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return tiny("gemma3_text", directory, seed, **(defaults | overrides))


def tiny_phi3(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    return tiny("phi3", directory, seed, **overrides)


def tiny_qwen3_moe(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Layer 0 dense, layer 1 with four experts."""
    defaults = {
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
    }
    return tiny("qwen3_moe", directory, seed, **(defaults | overrides))


def tiny_mixtral(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    defaults = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return tiny("mixtral", directory, seed, **(defaults | overrides))


BUILDERS: dict[str, Callable[..., Path]] = {
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "gemma": tiny_gemma,
    "gemma2": tiny_gemma2,
    "gemma3_text": tiny_gemma3,
    "phi3": tiny_phi3,
    "qwen3_moe": tiny_qwen3_moe,
    "mixtral": tiny_mixtral,
}


def write_tokenizer(directory: Path, characters: str = CHARACTERS) -> None:
    """One token a character, lower case, three special tokens first; it decodes what it encodes.

    (For model type qwen2 transformers insists on its own pre-tokenizer, which loses the spaces.)
    """
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *characters))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL[0]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "model_max_length": SIZE["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def edit_json(path: Path, **changes: Any) -> None:
    """Set members of a JSON object in a file; None removes one."""
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}, indent=2))


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Let `change` edit the dictionary of a single-file checkpoint's tensors, and write it back."""
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / WEIGHTS).items()}
    change(tensors)
    apart = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(apart, directory / WEIGHTS, metadata={"format": "pt"})


def fine_tune(directory: Path, seed: int, moved: float) -> Path:
    """Move every matrix of a checkpoint by normal noise of that standard deviation, as training moves weights."""
    drawn = torch.Generator().manual_seed(seed)

    def move(found: dict[str, Tensor]) -> None:
        for name, tensor in found.items():
            if tensor.ndim == 2:
                found[name] = (tensor + moved * torch.randn(tensor.shape, generator=drawn)).to(tensor.dtype)

    edit_tensors(directory, move)
    return directory


def shard(directory: Path, shards: int = 2) -> Path:
    """Turn a single-file checkpoint into one with that many shards and an index."""
    tensors = load_file(directory / WEIGHTS)
    names = sorted(tensors)
    size = math.ceil(len(names) / shards)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part: Mapping[str, Tensor] = {n: tensors[n].clone() for n in names[i * size : (i + 1) * size]}
        save_file(dict(part), directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / WEIGHTS).unlink()
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2))
    return directory
