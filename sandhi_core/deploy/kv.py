"""The size of a model's key and value cache, from its config.json."""

from collections.abc import Mapping
from typing import Any

from sandhi_core.errors import CheckpointError
from sandhi_core.records import DTYPE_BYTES, Part

HEAD_SIZES = {"gemma": 256, "gemma2": 256, "gemma3": 256, "gemma3_text": 256, "qwen3": 128}
"""Head sizes of families whose default is not hidden size / heads (transformers' configuration classes)."""

GEMMA3_PATTERN = 6
"""One layer in so many attends fully in a Gemma 3 whose configuration does not say."""


class KvCache(Part):
    """Keys and values that an engine keeps of every token."""

    bytes_per_token: int  # over all layers, those with a window too
    layers: int
    windowed_layers: int  # of these, layers that look back `window` tokens only
    window: int | None


def kv_cache(model: str, config: Mapping[str, Any], dtype: str) -> KvCache:
    """Cache of a decoder whose config.json is `config`, kept in `dtype` (safetensors' spelling).

    bytes_per_token = 2 * layers * kv heads * head size * bytes of the dtype. That counts windowed layers as
    if they kept every token, so it is an upper bound for them.

    Raises CheckpointError where the configuration does not say how many layers and heads there are.
    """
    config = config.get("text_config") or config
    try:
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        size = head_size(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"cannot tell how many layers and heads there are: {error}",
            model=model,
            file="config.json",
            remedy="restore num_hidden_layers, num_attention_heads and hidden_size",
        ) from None
    windowed = _windowed_layers(config, layers)
    return KvCache(
        bytes_per_token=2 * layers * kv_heads * size * DTYPE_BYTES[dtype],
        layers=layers,
        windowed_layers=windowed,
        window=int(config["sliding_window"]) if windowed else None,
    )


def head_size(config: Mapping[str, Any]) -> int:
    """Elements of an attention head of a decoder. Raises KeyError, TypeError, ValueError or ZeroDivisionError where its
    configuration does not say."""
    default = HEAD_SIZES.get(str(config.get("model_type"))) or (
        int(config["hidden_size"]) // int(config["num_attention_heads"])
    )
    return int(config.get("head_dim") or default)


def _windowed_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers with a sliding window. transformers 5 writes `layer_types`; before it every family had its rule
    (the `layer_types` defaults of transformers' configuration classes)."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    if config.get("layer_types"):
        return sum(kind == "sliding_attention" for kind in config["layer_types"])
    match config.get("model_type"):
        case "qwen2" | "qwen3" | "qwen3_moe":
            first = config.get("max_window_layers", 28)
            return max(layers - first, 0) if config.get("use_sliding_window") else 0
        case "gemma2":
            return (layers + 1) // 2
        case "gemma3" | "gemma3_text":
            return layers - layers // int(config.get("sliding_window_pattern") or GEMMA3_PATTERN)
        case _:
            return layers
