"""Cache sizes, against configurations as transformers writes them and its own idea of their layers."""

from typing import Any

import pytest
from transformers import AutoConfig

from sandhi_core.deploy.kv import kv_cache
from sandhi_core.errors import CheckpointError

LLAMA3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def test_llama_3_8b_takes_128_kib_a_token() -> None:
    cache = kv_cache("m", LLAMA3_8B, "BF16")
    assert (cache.bytes_per_token, cache.windowed_layers, cache.window) == (131_072, 0, None)
    assert kv_cache("m", LLAMA3_8B, "F32").bytes_per_token == 262_144


@pytest.mark.parametrize(
    ("change", "size"),
    [
        ({"num_key_value_heads": None}, 524_288),  # as many as heads
        ({"head_dim": 256}, 262_144),
        ({"head_dim": None}, 131_072),
    ],
)
def test_heads(change: dict[str, Any], size: int) -> None:
    assert kv_cache("m", LLAMA3_8B | change, "BF16").bytes_per_token == size


def test_the_text_part_of_a_multimodal_configuration_counts() -> None:
    assert kv_cache("m", {"text_config": LLAMA3_8B}, "BF16") == kv_cache("m", LLAMA3_8B, "BF16")


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "llama"},
        {"model_type": "mistral", "sliding_window": 64},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "phi3", "sliding_window": 64, "pad_token_id": 0},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 5},
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
        {"model_type": "gemma2", "sliding_window": 64},
        {"model_type": "gemma3_text", "sliding_window": 64},
        {"model_type": "gemma3_text", "sliding_window": 64, "layer_types": ["sliding_attention"] * 13},
    ],
)
def test_windows_are_those_that_transformers_sees(settings: dict[str, Any]) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 13, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {**shape, "vocab_size": 64, **settings}
    seen = AutoConfig.for_model(**config)
    if types := getattr(seen, "layer_types", None):
        expected = sum(kind == "sliding_attention" for kind in types)
    else:
        expected = 13 if getattr(seen, "sliding_window", None) else 0
    cache = kv_cache("m", config, "BF16")
    assert cache.windowed_layers == expected
    assert cache.window == (64 if expected else None)
    assert kv_cache("m", seen.to_dict(), "BF16") == cache  # as transformers 5 would write it


@pytest.mark.parametrize("change", [{"num_hidden_layers": "many"}, {"num_attention_heads": 0}, {"hidden_size": None}])
def test_a_configuration_that_says_too_little(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"model m file config\.json"):
        kv_cache("m", LLAMA3_8B | change, "BF16")
