"""How checkpoints are broken on purpose: edits of a directory, and what is to be told of one."""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models import (
    INDEX,
    WEIGHTS,
    edit_json,
    edit_tensors,
    write_tokenizer,
)

CONFIG = "config.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHOUTED = "MODEL-00002-OF-00002.safetensors"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "4d7a" * 16 + "\nsize 12345\n"
UP, Q = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"
Build = Callable[..., Path]
Edit = Callable[[Path], object]


@dataclass(frozen=True)
class Refused:
    """`message` and `remedy` are parts of what is told of `file` and `tensor` under the first of `codes`."""

    make: Edit
    codes: tuple[str, ...]
    file: str | None
    message: str
    remedy: str
    tensor: str | None = None


def made(build: Build, *edits: Edit, **config: Any) -> Edit:
    def make(directory: Path) -> None:
        build(directory, **config)
        for edit in edits:
            edit(directory)

    return make


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Edit:
    return lambda d: edit_tensors(d, lambda t: (change(t), None)[1])


def drop(*parts: str) -> Edit:
    return tensors(lambda t: [t.pop(n) for n in list(t) if any(p in n for p in parts)])


def add(**named: Tensor) -> Edit:
    return tensors(lambda t: t.update(named))


def renamed(old: str, new: str) -> Edit:
    return tensors(lambda t: t.update({n.replace(old, new): t.pop(n) for n in list(t)}))


def prefixed(prefix: str) -> Edit:
    return tensors(lambda t: t.update({prefix + n: t.pop(n) for n in list(t)}))


def config(**changes: Any) -> Edit:
    return lambda d: edit_json(d / CONFIG, **changes)


def text(name: str, content: str | bytes) -> Edit:
    return lambda d: (d / name).write_bytes(content.encode() if isinstance(content, str) else content)


def gone(*names: str) -> Edit:
    return lambda d: [(d / name).unlink() for name in names]


def moved(old: str, new: str) -> Edit:
    return lambda d: (d / old).rename(d / new)


def indexed(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(directory: Path) -> None:
        index = json.loads((directory / INDEX).read_text())
        change(index["weight_map"])
        (directory / INDEX).write_text(json.dumps(index))

    return edit


def forget(weight_map: dict[str, str]) -> None:
    for name in [n for n, file in weight_map.items() if file == SECOND]:
        del weight_map[name]


def stale(directory: Path) -> None:
    """A single file of before beside shards that were moved on."""
    save_file(load_file(directory / FIRST), directory / WEIGHTS, metadata={"format": "pt"})


def pickled(name: str) -> Edit:
    def edit(directory: Path) -> None:
        torch.save(load_file(directory / WEIGHTS), directory / name)
        (directory / WEIGHTS).unlink()

    return edit


def snapshot(directory: Path) -> None:
    """As a hub's cache has it, its blob gone."""
    blobs = directory.parent / f"{directory.name}-blobs"
    blobs.mkdir()
    (directory / WEIGHTS).rename(blobs / "4d7a")
    (directory / WEIGHTS).symlink_to(os.path.relpath(blobs / "4d7a", directory))
    (blobs / "4d7a").unlink()


def peft(directory: Path) -> None:
    """What `PeftModel.save_pretrained` leaves: no configuration of the base."""
    directory.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 2, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file({name.format("A"): torch.ones(2, 32), name.format("B"): torch.ones(32, 2)},
              directory / "adapter_model.safetensors")  # fmt: skip
    write_tokenizer(directory)


def other(model_type: str, auto: Any = AutoModelForCausalLM, **settings: Any) -> Edit:
    """A model of a kind that is none of those supported, as transformers saves it."""

    def make(directory: Path) -> None:
        auto.from_config(AutoConfig.for_model(model_type, **settings)).save_pretrained(directory)
        write_tokenizer(directory)

    return make


def quantised(parts: dict[str, Tensor], method: str | None = None) -> Edit:
    """The matrix UP replaced by what a quantisation leaves of it."""

    def edit(directory: Path) -> None:
        edit_tensors(
            directory,
            lambda t: (t.pop(UP), t.update({UP.removesuffix("weight") + n: p for n, p in parts.items()}), None)[2],
        )
        if method is not None:
            edit_json(directory / CONFIG, quantization_config={"quant_method": method})

    return edit


def header(text_of: bytes, claimed: int | None = None) -> Edit:
    length = len(text_of) if claimed is None else claimed
    return lambda d: (d / WEIGHTS).write_bytes(struct.pack("<Q", length) + text_of)


def cut(name: str, by: int) -> Edit:
    return lambda d: os.truncate(d / name, (d / name).stat().st_size - by)


def fused(tensors: dict[str, Tensor]) -> None:
    """q, k and v of every layer as one matrix, head by head as GPT-NeoX stores it or one after another: no shape tells
    which of the two."""
    for name in [n for n in tensors if n.endswith("q_proj.weight")]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        tensors[name.replace("q_proj", "query_key_value")] = torch.cat(parts)


I32, U8 = partial(torch.ones, 4, 4, dtype=torch.int32), partial(torch.ones, 768, 1, dtype=torch.uint8)
RESAVE, SOURCE, UNQUANTISED = "save_pretrained", "model's source", "use the unquantised checkpoint"
MISSING, UNKNOWN = "loaders would make it up", "loaders would drop it"
NONE_SUCH = "no tensor has a name that"
