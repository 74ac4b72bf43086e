"""A real vLLM serves exports: what it answers is what was scored, what is shared lies in memory once, and what it
cannot serve it refuses."""

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from sandhi_core.layout import read_manifest
from sandhi_core.memory import mappings, weight_files
from sandhi_core.serving.load import load
from tests.conftest import VLLM
from tests.models import edit_json, edit_tensors, tiny_qwen2
from tests.serving.vllm_plugin.conftest import Engines
from tests.serving.vllm_plugin.exports import exported, moved, widened

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 6
K, OUT = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.o_proj.weight"
GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
BOTH = ("first", "second")
MERGED = {K: BOTH, OUT: BOTH, GATE: BOTH, UP: BOTH, DOWN: ("second",)}
ADDED = {
    ("second", K): (3, True),  # beside a bias, where the model has one
    ("second", OUT): (0, True),
    ("second", GATE): (2, False),
    ("second", DOWN): (4, True),  # merged for this model alone: private
}

Answers = dict[str, Any]


class Reference(NamedTuple):
    """What the loader, whose answers were scored, continues prompts with."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


def reference(directory: Path, prompts: Sequence[Sequence[int]]) -> Reference:
    model = load(directory)
    tokens, logprobs = [], []
    for prompt in prompts:
        said: list[int] = []
        sure: list[float] = []
        for _ in range(TOKENS):
            with torch.inference_mode():
                scores = model(torch.tensor([[*prompt, *said]])).logits[0, -1].float().log_softmax(-1)
            said.append(int(scores.argmax()))
            sure.append(float(scores.max()))
        tokens.append(said)
        logprobs.append(sure)
    return Reference(tokens, logprobs)


def require_equal(answers: Answers, expected: Reference) -> None:
    assert answers["tokens"] == expected.tokens
    torch.testing.assert_close(torch.tensor(answers["logprobs"]), torch.tensor(expected.logprobs), rtol=0, atol=1e-4)


def random_prompts(vocabulary: int) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocabulary, (4 + at % 9,), generator=drawn).tolist() for at in range(50)]


@pytest.fixture(scope="module")
def prompts(trained: Path) -> list[list[int]]:
    """Fifty questions of the demo's tasks."""
    tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
    files = [trained / "tasks" / f"{task}.jsonl" for task in ("sort", "past", "units", "largest", "formula")]
    asked = [json.loads(line)["query"] for file in files for line in file.read_text().splitlines()[:10]]
    return [tokenizer.encode(query).ids for query in asked]


@pytest.fixture(scope="module")
def trained_export(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trained models in fp32 with one tied embedding: `first` an ordinary checkpoint, `second` with residuals."""
    folder = tmp_path_factory.mktemp("trained")
    source = widened(trained / "models" / "sorter", folder / "widened")
    models = {name: moved(source, folder / name, seed, dtype=torch.float32) for seed, name in enumerate(BOTH)}
    for path in models.values():
        edit_json(path / "config.json", dtype="float32")
    return exported(folder / "root", models, MERGED, ADDED)


@pytest.fixture(scope="module")
def half_export(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in bf16, without residuals."""
    folder = tmp_path_factory.mktemp("half")
    source = widened(trained / "models" / "sorter", folder / "widened")
    models = {name: moved(source, folder / name, seed) for seed, name in enumerate(BOTH)}
    return exported(folder / "root", models, MERGED, {})


@pytest.fixture(scope="module")
def qwen_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random qwen2 models in fp32: biases, one key-value head, a head of their own, a vocabulary that vLLM pads."""
    folder = tmp_path_factory.mktemp("qwen")
    size = {"head_dim": 32, "hidden_size": 128, "num_key_value_heads": 1, "vocab_size": 100}
    models = {name: tiny_qwen2(folder / name, seed, dtype=torch.float32, **size) for seed, name in enumerate(BOTH)}
    same = load_file(models["first"] / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        edit_tensors(models["second"], lambda tensors, name=name: tensors.update({name: same[name]}))
    return exported(folder / "root", models, MERGED, ADDED)


class Pair(NamedTuple):
    """Two members of one export, served at once, and the mappings of their weight files while both were."""

    answers: dict[str, Answers]
    spans: dict[str, list[tuple[str, int, int, int]]]  # file, rss, pss, private_dirty


@pytest.fixture(scope="module")
def pair(engines: Engines, trained_export: Path, prompts: list[list[int]]) -> Pair:
    options = {"dtype": "float32", "model_loader_extra_config": {"digests": "full"}}
    asked = {name: engines.start(trained_export / name, prompts, TOKENS, hold=True, **options) for name in BOTH}
    answers = {name: engines.answered(result) for name, result in asked.items()}
    spans: dict[str, list[tuple[str, int, int, int]]] = {}
    for name in BOTH:
        files = weight_files(trained_export / name)
        found = [span for span in mappings(answers[name]["pids"][0]) if files.get(span) is not None]
        spans[name] = [(Path(s.path).name, s.rss, s.pss, s.private_dirty) for s in found]
    return Pair(answers, spans)


# --- what is served is what was scored ----------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_a_pair_answers_what_was_scored(pair: Pair, trained_export: Path, prompts: list[list[int]], name: str) -> None:
    require_equal(pair.answers[name], reference(trained_export / name, prompts))


def test_ranks_share_layers_with_biases_and_heads(engines: Engines, qwen_export: Path) -> None:
    prompts = random_prompts(100)
    options = {"dtype": "float32", "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    result = engines.start(qwen_export / "second", prompts, TOKENS, **options)
    require_equal(engines.answered(result), reference(qwen_export / "second", prompts))


def test_half_precision_without_additions_answers_as_stock_vllm(
    engines: Engines, half_export: Path, prompts: list[list[int]]
) -> None:
    stock = {"quantization": None, "load_format": "auto"}
    results = [engines.start(half_export / "first", prompts, TOKENS, dtype="bfloat16", **o) for o in ({}, stock)]
    ours, theirs = (engines.answered(result) for result in results)
    assert ours["tokens"] == theirs["tokens"]


# --- shared once --------------------------------------------------------------------------------------------


def test_shared_files_lie_in_memory_once(pair: Pair, trained_export: Path) -> None:
    manifest = read_manifest(trained_export)
    for name in BOTH:
        shared = {t.file for t in manifest.models[name].tensors.values() if t.sharing != "private"}
        found = [span for span in pair.spans[name] if span[0] in shared]
        assert len(shared) == 5 and sum(rss for _, rss, _, _ in found) > 200_000
        for _, rss, pss, dirty in found:
            assert dirty == 0
            assert abs(pss - rss / 2) <= 1024  # the kernel counts in KiB


# --- installed ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("engines")
def test_the_wheel_asks_for_nothing_that_the_engine_does_not_have() -> None:
    done = subprocess.run([VLLM, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    assert not [line for line in done.stdout.splitlines() if line.startswith("sandhi ")]
    shown = subprocess.run([VLLM, "-m", "pip", "show", "sandhi"], capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, "the plugin is not installed beside the engine"


# --- refused ------------------------------------------------------------------------------------------------


def copied(export: Path, root: Path) -> Path:
    shutil.copytree(export, root)
    for file in root.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    return root


def shard_of(root: Path, model: str, tensor: str) -> Path:
    return root / model / read_manifest(root).models[model].tensors[tensor].file


def without(file: Path, tensor: str) -> None:
    kept = {name: t.clone() for name, t in load_file(file).items() if name != tensor}
    save_file(kept, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def faults(engines: Engines, trained_export: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Engines over damaged exports and configurations that cannot be served, all started at once."""
    folder = tmp_path_factory.mktemp("faults")
    damaged = {n: copied(trained_export, folder / n) for n in ("gone", "unsaid", "half", "bit", "shape")}
    q = "model.layers.2.self_attn.q_proj.weight"
    without(shard_of(damaged["gone"], "first", q), q)
    for case, tensor in (("unsaid", q), ("half", "model.layers.0.self_attn.q_proj.weight")):
        without(shard_of(damaged[case], "first", tensor), tensor)
        said = json.loads((damaged[case] / "sandhi.json").read_text())
        del said["models"]["first"]["tensors"][tensor]
        (damaged[case] / "sandhi.json").write_text(json.dumps(said))
    flipped = shard_of(damaged["bit"], "first", GATE)
    raw = bytearray(flipped.read_bytes())
    raw[-1] ^= 1
    flipped.write_bytes(raw)
    config = damaged["shape"] / "first" / "config.json"
    edit_json(config, num_key_value_heads=4)
    said = json.loads((damaged["shape"] / "sandhi.json").read_text())
    said["models"]["first"]["files"]["config.json"] = hashlib.sha256(config.read_bytes()).hexdigest()
    (damaged["shape"] / "sandhi.json").write_text(json.dumps(said))
    full = {"dtype": "float32", "model_loader_extra_config": {"digests": "full"}}
    asked = {case: engines.start(root / "first", **full) for case, root in damaged.items()}
    first = trained_export / "first"
    return asked | {
        "dtype": engines.start(first, dtype="bfloat16"),
        "lora": engines.start(first, dtype="float32", enable_lora=True, max_loras=1),
        "alone": engines.start(first, dtype="float32", load_format="auto"),
        "option": engines.start(first, dtype="float32", model_loader_extra_config={"digest": "full"}),
    }


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("gone", r"tensor model\.layers\.2\.self_attn\.q_proj\.weight: is missing"),
        ("unsaid", r"tensor model\.layers\.2\.self_attn\.q_proj\.weight: "),
        ("half", r"tensor model\.layers\.0\.self_attn\.q_proj\.weight: "),
        ("bit", rf"model first .*tensor {re.escape(GATE)}: .*digest is [0-9a-f]{{64}}, [0-9a-f]{{64}} is expected"),
        ("shape", rf"tensor {re.escape(K)}: "),
        ("dtype", r"is F32 like .* others, the engine computes in bfloat16.*give --dtype float32"),
        ("lora", r"LoRA is not supported"),
        ("alone", r"--quantization sandhi needs --load-format sandhi"),
        ("option", r"unknown option of the loader: digest"),
    ],
)
def test_an_engine_does_not_start(engines: Engines, faults: dict[str, Path], case: str, said: str) -> None:
    error = engines.failed(faults[case])
    assert re.search(said, error, re.DOTALL), error
