"""Checkpoints of real sizes without weights: real headers, index, configuration and tokenizer, and sparse files of
zeros that take no room. Checks, grouping and planning read nothing else, so they meet all the names and shapes."""

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

from sandhi_core.checkpoints.survey_files import INDEX

SHARD_BYTES = 5 * 10**9
"""As save_pretrained cuts large models."""
QUESTIONS = 400
_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""Of Llama 3; the rest of their configuration is the same."""

Tensors = list[tuple[str, tuple[int, ...]]]


def hollow_pool(folder: Path, shape: str, models: int) -> Path:
    """A pool file and its checkpoints and tasks below `folder`. All models have the same files, but for their config's
    `_name_or_path`, as fine-tunes of one base have."""
    config = LlamaConfig(**_LLAMA_3, **SHAPES[shape])
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    tensors = [(name, tuple(t.shape)) for name, t in network.state_dict().items()]
    shards = _cut(tensors)
    files = {f"model-{n:05}-of-{len(shards):05}.safetensors": shard for n, shard in enumerate(shards, 1)}
    headers = {file: _header(shard) for file, shard in files.items()}
    weight_map = {name: file for file, shard in files.items() for name, _ in shard}
    index = {"metadata": {"total_size": _nbytes(tensors)}, "weight_map": weight_map}
    tokenizer = _tokenizer(config.vocab_size)
    names = [f"m{n:03}" for n in range(models)]
    for name in names:
        directory = folder / "models" / name
        directory.mkdir(parents=True)
        for file, (header, nbytes) in headers.items():
            with (directory / file).open("wb") as f:
                f.write(header)
                f.truncate(len(header) + nbytes)
        (directory / INDEX).write_text(json.dumps(index))
        said = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "_name_or_path": f"org/{name}"}
        (directory / "config.json").write_text(json.dumps(said, default=str))
        (directory / "tokenizer.json").write_text(tokenizer)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<t0>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    _task(folder / "tasks")
    task = {"task": "numbers", "metric": "acc", "budget": 0.02}
    pool = {
        "name": f"hollow-{shape}",
        "models": [{"name": name, "path": f"models/{name}", "tasks": [task]} for name in names],
        "evaluation": {"include_path": "tasks"},
    }
    path = folder / "pool.yaml"
    path.write_text(yaml.safe_dump(pool, sort_keys=False))
    return path


def _cut(tensors: Tensors) -> list[Tensors]:
    shards: list[Tensors] = [[]]
    for tensor in tensors:
        if shards[-1] and _nbytes([*shards[-1], tensor]) > SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def _nbytes(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    return sum(2 * prod(shape) for _, shape in tensors)


def _header(tensors: Tensors) -> tuple[bytes, int]:
    """A BF16 shard's header as Sandhi writes it, and how many bytes of data follow it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in sorted(tensors):
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _tokenizer(size: int) -> str:
    """As many tokens as the model has, each a word of its own."""
    model = {"type": "WordLevel", "vocab": {f"<t{n}>": n for n in range(size)}, "unk_token": "<t0>"}
    return json.dumps({"version": "1.0", "model": model, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}})


def _task(folder: Path) -> None:
    folder.mkdir()
    rows = [{"query": f"after {n} comes", "choices": [f" {n + 1}", f" {n - 1}"], "gold": 0} for n in range(QUESTIONS)]
    (folder / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "task": "numbers",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "numbers.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    (folder / "numbers.yaml").write_text(yaml.safe_dump(config))
