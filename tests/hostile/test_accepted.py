"""Odd checkpoints that are sound, made from scratch, in one pool that is really built: each comes out with its own
names, files and private bytes, and answers as transformers does on the original with the shared tensors in place.

Cases carry the number and bug of the public report that they stand for.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from sandhi_core.layout import read_manifest
from sandhi_core.records import Manifest
from sandhi_core.serving.load import load
from tests.evaluation.local_tasks import choice_task
from tests.hostile.broken import config, made, tensors, text
from tests.models import (
    CHARACTERS,
    INDEX,
    edit_json,
    edit_tensors,
    fine_tune,
    shard,
    tiny_gemma,
    tiny_llama,
    tiny_qwen2,
    tiny_qwen3_moe,
    write_tokenizer,
)
from tests.pipelines.conftest import built, line_alone, sandhi

pytestmark = pytest.mark.slow
GENERATION = '{"eos_token_id": [2, 5], "do_sample": false, "temperature": 0.9, "top_p": 7}\r\n'


def tuned(directory: Path) -> Path:
    """A fine-tune of the one base that most models here have."""
    return fine_tune(directory, sum(map(ord, directory.name)), 0.01)


def stripped(directory: Path) -> None:
    """As the base class saves it: no head, and no `model.` in front."""
    edit_tensors(directory, lambda t: [t.update({n.removeprefix("model."): t.pop(n)}) for n in list(t)] and None)


def old_rope(directory: Path) -> None:
    edit_json(directory / "config.json", rope_parameters=None, rope_theta=10000)


def linked(directory: Path) -> None:
    """As a hub's cache has it: a snapshot of links to blobs."""
    blobs = directory.parent / f"{directory.name}-blobs"
    blobs.mkdir()
    for at, file in enumerate(sorted(p for p in directory.iterdir() if p.is_file())):
        file.rename(blobs / str(at))
        file.symlink_to(os.path.relpath(blobs / str(at), directory))


def stacked(directory: Path) -> None:
    """Experts as transformers holds them in memory."""
    held = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    edit_tensors(
        directory, lambda t: (t.clear(), t.update({n: v.to(torch.bfloat16) for n, v in held.items()}), None)[2]
    )


def buffered(found: dict[str, Tensor]) -> None:
    found["model.rotary_emb.inv_freq"] = torch.ones(4)


def aliased(found: dict[str, Tensor]) -> None:
    found["model.layers.1.self_attn.q_proj.weight"] = found["model.layers.0.self_attn.q_proj.weight"]


ACCEPTED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "tied": ("3 mergekit#350", made(tiny_llama, tuned, tie_word_embeddings=True)),
    "stripped": ("5 llama.cpp#9211", made(tiny_llama, tuned, stripped, tie_word_embeddings=True)),
    "biased": ("8 ANEForge#253", made(tiny_qwen2, tuned)),
    "buffers": ("10 vllm#1977, 38 mergekit#85", made(tiny_llama, tuned, tensors(buffered), tensors(aliased), shard)),
    "far": ("13 mergekit#325", made(tiny_llama, tuned, rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    "spelled": ("14 DeepSpeed#8345", made(tiny_llama, tuned, old_rope)),
    "experts": ("18 vllm#36997, one by one", made(tiny_qwen3_moe)),
    "stacked": ("18 MoE-Infinity#110, all at once", made(tiny_qwen3_moe, stacked)),
    "large": ("20 mergekit#324", made(tiny_llama, tuned, num_hidden_layers=3, intermediate_size=64)),
    "gemma": ("21 unsloth#219", made(tiny_gemma)),
    "rows": (
        "22 fusion_bench#215, 24 mergekit#425",
        made(tiny_llama, tuned, lambda d: write_tokenizer(d, CHARACTERS[:55]), vocab_size=72),
    ),
    "permuted": ("23 mergekit#169", made(tiny_llama, tuned, lambda d: write_tokenizer(d, CHARACTERS[::-1]))),
    "sided": (
        "27 unsloth#5386, 28 transformers#29988, 41 kubernetes-manifests#2517",
        made(tiny_llama, tuned, text("generation_config.json", GENERATION), config(eos_token_id=[2, 5]), linked),
    ),
}


class Built:
    def __init__(self, folder: Path) -> None:
        choice_task(folder / "tasks")
        for name, (_, make) in ACCEPTED.items():
            make(folder / name)
        tasks = [{"task": "letters", "metric": "acc", "budget": 0.9}]
        pool = {
            "name": "odd",
            "models": [{"name": name, "path": name, "tasks": tasks} for name in ACCEPTED],
            "evaluation": {"include_path": "tasks", "dtype": "float32", "device": "cpu", "threads": 1},
        }
        (folder / "odd.yaml").write_text(yaml.safe_dump(pool))
        self.folder, self.root = folder, folder / "root"
        with line_alone():
            self.document = built(folder / "odd.yaml", self.root)
        self.export = Path(self.document["pools"]["odd"]["export"])
        self.manifest: Manifest = read_manifest(self.export)

    def merged(self, model: str) -> set[str]:
        """Names of the tensors that are no longer the model's own bytes."""
        own, out = stored(self.folder / model), stored(self.export / model)
        assert own.keys() == out.keys()
        return {n for n in own if own[n].dtype != out[n].dtype or not torch.equal(own[n], out[n])}


def stored(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        answer: Tensor = model.eval()(input_ids=torch.arange(3, 60).unsqueeze(0)).logits
    return answer


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("accepted"))


@pytest.mark.parametrize("model", ACCEPTED, ids=[f"{case} ({m})" for m, (case, _) in ACCEPTED.items()])
def test_it_answers_as_the_original_with_shared_tensors_in_place(odd: Built, model: str) -> None:
    shared, out = odd.merged(model), stored(odd.export / model)
    original = AutoModelForCausalLM.from_pretrained(odd.folder / model, dtype="auto")
    names = dict(original.named_parameters())
    with torch.no_grad():
        for name in shared:
            names[name if name in names else f"model.{name}"].copy_(out[name])
    expected = logits(original)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(odd.export / model, dtype="auto")), expected)
    assert torch.equal(logits(load(odd.export / model)), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize("model", ACCEPTED)
def test_every_other_file_has_the_owners_bytes_and_none_is_a_link(odd: Built, model: str) -> None:
    files = {p.name: p for p in (odd.folder / model).iterdir() if p.suffix != ".safetensors" and p.name != INDEX}
    for name, path in files.items():
        assert (odd.export / model / name).read_bytes() == path.read_bytes()
    assert not [p for p in (odd.export / model).rglob("*") if p.is_symlink()]


def test_only_projections_are_shared_and_only_with_their_like(odd: Built) -> None:
    merged = {model: odd.merged(model) for model in ACCEPTED}
    assert all(name.endswith("_proj.weight") for names in merged.values() for name in names)
    assert all(merged[m] for m in ("tied", "biased", "buffers", "spelled", "rows", "permuted", "sided"))
    assert not merged["stripped"]  # a file holds its tensor's name, so under other names there is nothing to spare
    assert not [name for name in merged["far"] if "self_attn" in name] and merged["far"]  # another rope
    assert not [name for name in merged["large"] if "mlp" in name] and merged["large"]
    assert not merged["gemma"] and not [n for m in ("experts", "stacked") for n in merged[m] if "experts" in n]


def test_a_tied_head_is_counted_once(odd: Built) -> None:
    tensors_of = odd.manifest.models["tied"].tensors
    assert "lm_head.weight" not in tensors_of and "model.embed_tokens.weight" in tensors_of


def test_one_write_through_a_link_is_found_in_every_model_that_has_it(odd: Built, tmp_path: Path) -> None:
    """40 tooling-trusted-releases#515: what is written under one name is written under all."""
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", odd.export, copy], check=True)
    status, out, err = sandhi("verify", copy, "--json")
    assert status == 0, err
    inode: dict[int, list[Path]] = {}
    for path in copy.rglob("*.safetensors"):
        inode.setdefault(path.stat().st_ino, []).append(path)
    several = next(paths for paths in inode.values() if len(paths) > 2)
    assert several[0].stat().st_mode & 0o777 == 0o444
    several[0].chmod(0o644)
    with several[0].open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    status, out, _ = sandhi("verify", copy, "--json")
    assert status == 1
    told = {(p["code"], p["model"]) for p in json.loads(out)["problems"]}
    assert told >= {("export-tensor", path.parent.name) for path in several}
