"""Checkpoints as people really have them: half downloaded, wrongly converted, ambiguous, damaged. Each must
give a problem that names its file (and tensor), never an exception, never silence."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from sandhi_core.checkpoints.architecture import problems_of, slots
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.errors import CheckpointError, Problem
from sandhi_core.pools.pool import ModelEntry, TaskBudget
from sandhi_core.preflight.checks import check_model
from tests.models import INDEX, WEIGHTS, edit_json, edit_tensors, shard, tiny_gemma3, tiny_llama, tiny_mixtral

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 12345\n"


def check(directory: Path, scans: Path | None = None) -> list[Problem]:
    """The model's errors; every one is complete, on one line, and leaves no fingerprint."""
    entry = ModelEntry(name="m", path=str(directory), tasks=(TaskBudget(task="quiz", metric="acc", budget=0.1),))
    problems, fingerprint = check_model(entry, scans)
    errors = [p for p in problems if p.severity == "error"]
    assert (fingerprint is None) == bool(errors)
    for problem in problems:
        assert problem.model == "m"
        assert problem.message and problem.remedy
        assert "\n" not in problem.line()
    return errors


def found(directory: Path) -> set[tuple[str, str | None]]:
    return {(p.code, within(directory, p.file)) for p in check(directory)}


def within(directory: Path, file: str | None) -> str | None:
    """A file as it is called in the directory; problems must give its whole path."""
    assert file is None or file.startswith(f"{directory}/")
    return file and file.removeprefix(f"{directory}/")


# --- files --------------------------------------------------------------------------------------------------


def write(name: str, data: bytes | str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return change


def remove(*names: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return change


def rename(old: str, new: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / old).rename(directory / new)

    return change


def truncate(name: str, by: int) -> Callable[[Path], None]:
    return lambda directory: os.truncate(directory / name, (directory / name).stat().st_size - by)


def only_pickle(directory: Path) -> None:
    torch.save(load_file(directory / WEIGHTS), directory / "pytorch_model.bin")
    (directory / WEIGHTS).unlink()


def only_adapter(directory: Path) -> None:
    remove("config.json", WEIGHTS)(directory)
    write("adapter_config.json", '{"peft_type": "LORA"}')(directory)
    save_file({"base_model.model.q.lora_A.weight": torch.ones(2, 2)}, directory / "adapter_model.safetensors")


def dangling(name: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).symlink_to("../../blobs/gone")

    return change


def overlong_header(directory: Path) -> None:
    data = bytearray((directory / WEIGHTS).read_bytes())
    data[:8] = struct.pack("<Q", 2**60)
    (directory / WEIGHTS).write_bytes(data)


def cut_header(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:100])


def fifo(directory: Path) -> None:
    os.mkfifo(directory / "notes")


def linked_folder(directory: Path) -> None:
    (directory / "loop").symlink_to(directory)


SINGLE_FILE: dict[str, tuple[Callable[[Path], None], set[tuple[str, str | None]]]] = {
    "no config": (remove("config.json"), {("config-missing", "config.json")}),
    "no weights": (remove(WEIGHTS), {("weights-missing", WEIGHTS)}),
    "pickle only": (only_pickle, {("pickle-only", "pytorch_model.bin")}),
    "adapter only": (only_adapter, {("adapter-only", "adapter_config.json")}),
    "an adapter beside the weights": (
        write("adapter_config.json", "{}"),
        {("adapter-beside", "adapter_config.json")},
    ),
    "gguf only": (
        rename(WEIGHTS, "model.gguf"),
        {("weights-missing", WEIGHTS)},
    ),
    "weights of another name": (
        rename(WEIGHTS, "consolidated.safetensors"),
        {("weights-missing", "consolidated.safetensors")},
    ),
    "weights beside the weights": (
        lambda d: write("model.fp16.safetensors", (d / WEIGHTS).read_bytes())(d),
        {("weights-stray", "model.fp16.safetensors")},
    ),
    "truncated weights": (truncate(WEIGHTS, 100), {("file-damaged", WEIGHTS)}),
    "truncated in the header": (cut_header, {("file-damaged", WEIGHTS)}),
    "bytes too many": (
        lambda d: write(WEIGHTS, (d / WEIGHTS).read_bytes() + b"\0" * 8)(d),
        {("file-damaged", WEIGHTS)},
    ),
    "empty weights": (write(WEIGHTS, b""), {("file-damaged", WEIGHTS)}),
    "overlong header": (overlong_header, {("file-damaged", WEIGHTS)}),
    "an html page": (write(WEIGHTS, "<html>Sign in</html>" * 99), {("file-damaged", WEIGHTS)}),
    "LFS pointer for weights": (write(WEIGHTS, LFS), {("lfs-pointer", WEIGHTS)}),
    "LFS pointer for tokenizer": (write("tokenizer.json", LFS), {("lfs-pointer", "tokenizer.json")}),
    "LFS pointer for config": (write("config.json", LFS), {("lfs-pointer", "config.json")}),
    "config that is no JSON": (write("config.json", "{"), {("config-invalid", "config.json")}),
    "config that is no object": (write("config.json", "[]"), {("config-invalid", "config.json")}),
    "config that is no text": (write("config.json", b"\xff\xfe\xff"), {("config-invalid", "config.json")}),
    "config nested too deeply": (
        write("config.json", '{"a":' + "[" * 99999 + "]" * 99999 + "}"),
        {("config-invalid", "config.json")},
    ),
    "config of another kind": (
        lambda d: edit_json(d / "config.json", model_type="gpt_neox"),
        {("model-type-unsupported", "config.json")},
    ),
    "an activation that nobody has": (
        lambda d: edit_json(d / "config.json", hidden_act="nonesuch"),
        {("config-unusable", "config.json")},
    ),
    "a dtype that is none": (
        lambda d: edit_json(d / "config.json", dtype=3),
        {("config-unusable", "config.json")},
    ),
    "an architecture of another task": (
        lambda d: edit_json(d / "config.json", architectures=["LlamaForSequenceClassification"]),
        {("architectures-mismatch", "config.json")},
    ),
    "an architecture of another type": (
        lambda d: edit_json(d / "config.json", architectures=["MistralForCausalLM"]),
        {("architectures-mismatch", "config.json")},
    ),
    "architectures that are no list": (
        lambda d: edit_json(d / "config.json", architectures={"a": 1}),
        {("architectures-mismatch", "config.json")},
    ),
    "tokenizer settings that are no JSON": (
        write("tokenizer_config.json", "{"),
        {("tokenizer-unusable", "tokenizer_config.json")},
    ),
    "tokenizer settings that are no object": (
        write("tokenizer_config.json", "[]"),
        {("tokenizer-unusable", "tokenizer_config.json")},
    ),
    "tokenizer that transformers cannot load": (
        write("tokenizer.json", '{"model": {"vocab": {"a": 1}}}'),
        {("tokenizer-unusable", "tokenizer.json")},
    ),
    "tokenizer that is none": (write("tokenizer.json", "{}"), {("tokenizer-invalid", "tokenizer.json")}),
    "tokenizer with odd numbers": (
        write("tokenizer.json", '{"model": {"vocab": {"a": "b"}}}'),
        {("tokenizer-invalid", "tokenizer.json")},
    ),
    "dangling weights": (dangling(WEIGHTS), {("link-dangling", WEIGHTS)}),
    "dangling tokenizer": (dangling("tokenizer.json"), {("link-dangling", "tokenizer.json")}),
    "a pipe": (fifo, {("file-irregular", "notes")}),
    "a folder that contains itself": (linked_folder, {("file-irregular", "loop")}),
    "a name that garbles terminals": (write("a\x1b[2Jb", "x"), {("file-name", ascii("a\x1b[2Jb"))}),
    "a name that is no text": (
        rename("generation_config.json", os.fsdecode(b"\xff.txt")),
        {("file-name", ascii("\udcff.txt"))},
    ),
}


@pytest.mark.parametrize("case", sorted(SINGLE_FILE))
def test_what_is_wrong_with_a_single_file_checkpoint_is_named(tmp_path: Path, case: str) -> None:
    change, expected = SINGLE_FILE[case]
    directory = tiny_llama(tmp_path / "m")
    change(directory)
    assert found(directory) == expected
    unseen_by_survey = {
        "tokenizer-invalid",
        "tokenizer-unusable",
        "model-type-unsupported",
        "config-unusable",
        "architectures-mismatch",
    }
    if not {code for code, _ in expected} & unseen_by_survey:
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(directory, "m")
        assert within(directory, caught.value.problem.file) in {file for _, file in expected}


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert found(tmp_path / "gone") == {("directory-missing", None)}
    assert check(tmp_path / "gone")[0].message == f"there is no directory {tmp_path / 'gone'}"
    (tmp_path / "file").write_text("x")
    assert check(tmp_path / "file")[0].message == f"{tmp_path / 'file'} is no directory"
    (tmp_path / "empty").mkdir()
    assert {code for code, _ in found(tmp_path / "empty")} == {
        "config-missing",
        "weights-missing",
        "tokenizer-missing",
    }


def test_the_size_of_a_truncated_file_is_told(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    size = (directory / WEIGHTS).stat().st_size
    truncate(WEIGHTS, 100)(directory)
    (problem,) = check(directory)
    assert str(size) in problem.message
    assert str(size - 100) in problem.message


# --- shards and their index ---------------------------------------------------------------------------------


def stale_single(directory: Path) -> None:
    save_file({"model.norm.weight": torch.ones(32)}, directory / WEIGHTS, metadata={"format": "pt"})


def with_index(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def changed(directory: Path) -> None:
        index = json.loads((directory / INDEX).read_text())
        change(index["weight_map"])
        (directory / INDEX).write_text(json.dumps(index))

    return changed


def twice(directory: Path) -> None:
    tensors = {name: t.clone() for name, t in load_file(directory / SECOND).items()}
    save_file(tensors | {"lm_head.weight": torch.ones(64, 32)}, directory / SECOND, metadata={"format": "pt"})


def forget_second(weight_map: dict[str, Any]) -> None:
    for name in [n for n, file in weight_map.items() if file == SECOND]:
        del weight_map[name]


SHARDED: dict[str, tuple[Callable[[Path], None], set[tuple[str, str | None]]]] = {
    "a single file as well": (stale_single, {("weights-ambiguous", WEIGHTS)}),
    "a shard is missing": (remove(SECOND), {("shard-missing", SECOND)}),
    "a shard is truncated": (truncate(SECOND, 1), {("file-damaged", SECOND)}),
    "a shard is a pointer": (write(SECOND, LFS), {("lfs-pointer", SECOND)}),
    "a shard more": (
        lambda d: write("model-00003-of-00002.safetensors", (d / FIRST).read_bytes())(d),
        {("weights-stray", "model-00003-of-00002.safetensors")},
    ),
    "the index forgets a shard": (with_index(forget_second), {("weights-stray", SECOND)}),
    "the index forgets a tensor": (
        with_index(lambda m: m.pop("model.norm.weight")),
        {("index-mismatch", SECOND)},
    ),
    "the index names a tensor too many": (
        with_index(lambda m: m.update({"model.extra": FIRST})),
        {("index-mismatch", FIRST)},
    ),
    "the index names the wrong shard": (
        with_index(lambda m: m.update({"model.norm.weight": FIRST})),
        {("index-mismatch", SECOND)},
    ),
    "a tensor is in two shards": (
        twice,
        {("tensor-duplicated", SECOND), ("index-mismatch", SECOND)},
    ),
    "the index is no JSON": (write(INDEX, "x"), {("index-invalid", INDEX)}),
    "the index is empty": (write(INDEX, "{}"), {("index-invalid", INDEX)}),
    "the index is a list": (write(INDEX, '{"weight_map": []}'), {("index-invalid", INDEX)}),
    "the index leads elsewhere": (
        with_index(lambda m: m.update({"model.norm.weight": "../m/" + SECOND})),
        {("index-invalid", INDEX), ("index-mismatch", SECOND)},
    ),
    "the index names numbers": (
        with_index(lambda m: m.update({"model.norm.weight": 7})),
        {("index-invalid", INDEX), ("index-mismatch", SECOND)},
    ),
    "the index names pickles": (
        with_index(lambda m: m.update(dict.fromkeys(m, "pytorch_model.bin"))),
        {("index-invalid", INDEX)},
    ),
    "the index is a pointer": (write(INDEX, LFS), {("lfs-pointer", INDEX)}),
}


@pytest.mark.parametrize("case", sorted(SHARDED))
def test_what_is_wrong_with_shards_is_named(tmp_path: Path, case: str) -> None:
    change, expected = SHARDED[case]
    directory = shard(tiny_llama(tmp_path / "m"))
    assert check(directory) == []
    change(directory)
    problems = {(p.code, within(directory, p.file)) for p in check(directory) if p.code != "tensor-missing"}
    assert problems == expected
    with pytest.raises(CheckpointError):
        Checkpoint.open(directory, "m")


# --- weights ------------------------------------------------------------------------------------------------


def quantise_like_bitsandbytes(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    tensors[name.replace("weight", "SCB")] = torch.ones(48)


def quantise_like_gptq(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"]
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        tensors[f"model.layers.0.mlp.up_proj.{part}"] = torch.ones(4, 4, dtype=torch.int32)


def quantise_like_nf4(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = torch.zeros(768, 1, dtype=torch.uint8)
    for part in ("absmax", "quant_map", "quant_state.bitsandbytes__nf4"):
        tensors[f"{name}.{part}"] = torch.zeros(4)


def quantise_to_fp8(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(1)


@pytest.mark.parametrize(
    "quantise", [quantise_like_bitsandbytes, quantise_like_gptq, quantise_like_nf4, quantise_to_fp8]
)
def test_quantised_weights_are_recognised(tmp_path: Path, quantise: Callable[[dict[str, Tensor]], None]) -> None:
    directory = tiny_llama(tmp_path / "m")
    edit_tensors(directory, quantise)
    problems = check(directory)
    assert {p.code for p in problems} == {"quantised"}  # and no flood of what follows from it
    assert all(p.file == str(directory / WEIGHTS) and p.tensor for p in problems)


def test_a_quantisation_in_the_configuration_is_enough(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    edit_json(directory / "config.json", quantization_config={"quant_method": "awq", "bits": 4})
    assert found(directory) == {("quantised", "config.json")}


def test_what_is_not_finite_is_named_after_every_look(tmp_path: Path) -> None:
    directory = tiny_mixtral(tmp_path / "m")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    edit_tensors(directory, lambda t: t[name][7, 1].fill_(float("inf")))
    for _ in range(2):
        (problem,) = check(directory, tmp_path / "scans")
        assert (problem.code, problem.file, problem.tensor) == ("not-finite", str(directory / WEIGHTS), name)
        assert "row 7" in problem.message


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_a_tensor_without_elements(tmp_path: Path, shape: tuple[int, ...]) -> None:
    directory = tiny_llama(tmp_path / "m")
    edit_tensors(directory, lambda t: t.update({"model.rotary_emb.inv_freq": torch.zeros(shape)}))
    assert check(directory, tmp_path / "scans") == []
    edit_tensors(directory, lambda t: t.update({"model.norm.weight": torch.zeros(shape)}))
    (problem,) = check(directory, tmp_path / "scans")
    assert (problem.code, problem.tensor) == ("tensor-shape", "model.norm.weight")
    assert problem.file == str(directory / WEIGHTS)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_tensor_that_is_missing_is_told_of_the_file_that_lists_all(tmp_path: Path, shards: int) -> None:
    directory = tiny_llama(tmp_path / "m")
    edit_tensors(directory, lambda t: t.pop("model.norm.weight"))
    if shards > 1:
        shard(directory, shards)
    (problem,) = check(directory)
    assert (problem.code, problem.tensor) == ("tensor-missing", "model.norm.weight")
    assert problem.file == str(directory / (WEIGHTS if shards == 1 else INDEX))


@pytest.mark.parametrize("model_type", ["gpt_neox", ["llama"], None])
def test_a_model_type_that_is_unknown_beside_quantised_weights(tmp_path: Path, model_type: object) -> None:
    directory = tiny_llama(tmp_path / "m")
    edit_tensors(directory, quantise_to_fp8)
    edit_json(directory / "config.json", model_type=model_type)
    assert {p.code for p in check(directory)} >= {"quantised"}


def test_a_multimodal_checkpoint_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    directory = tiny_gemma3(tmp_path / "m")
    edit_json(directory / "config.json", model_type="gemma3")
    (problem,) = check(directory)
    assert problem.code == "model-type-unsupported"
    assert "gemma3_text" in problem.remedy


def test_weights_that_change_between_look_and_scan(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    opened = Checkpoint.open(directory, "m")
    truncate(WEIGHTS, 4096)(directory)  # reading on would kill the process (SIGBUS)
    with pytest.raises(CheckpointError, match="changed"):
        opened.raw("model.norm.weight")


# --- anything at all ----------------------------------------------------------------------------------------

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
LIKELY = st.sampled_from(
    [
        {"full_attention": {"rope_type": "default"}},
        {"rope_type": "yarn"},
        float("nan"),
        1e308,
        -1,
        2**70,
        [2, 1],
        "auto",
    ]
)


@pytest.fixture(scope="module")
def opened_once(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    root = tmp_path_factory.mktemp("fuzz")
    builders = {"llama": tiny_llama, "gemma3": tiny_gemma3, "mixtral": tiny_mixtral}
    return {name: Checkpoint.open(build(root / name), "m") for name, build in builders.items()}


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_no_configuration_causes_an_exception(opened_once: dict[str, Checkpoint], data: st.DataObject) -> None:
    opened = opened_once[data.draw(st.sampled_from(sorted(opened_once)))]
    extra = [
        "rope_theta",
        "rope_scaling",
        "quantization_config",
        "text_config",
        "decoder_sparse_step",
        "cls",
        "self",
    ]
    keys = data.draw(st.lists(st.sampled_from([*opened.config, *extra]), min_size=1, max_size=3))
    config = opened.config | {key: data.draw(LIKELY | JUNK) for key in keys}
    problems = problems_of("m", config, opened.headers)
    assert all(p.message and p.remedy and "\n" not in p.line() for p in problems)
    digests = dict.fromkeys(opened.names, "0")
    if problems:
        with pytest.raises(CheckpointError):
            slots("m", config, opened.headers, digests)
    else:
        assert slots("m", config, opened.headers, digests)[0]


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_no_damage_to_a_weight_file_goes_unnoticed_or_raises(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tiny_llama(tmp_path_factory.mktemp("damage"))
    sound = (directory / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    damaged = bytearray(sound)
    for place in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=3)):
        damaged[place] = data.draw(st.integers(0, 255))
    (directory / WEIGHTS).write_bytes(damaged)
    problems = check(directory)
    reread = json.loads(damaged[8:header]) if not problems else {}
    assert problems or {n: v for n, v in reread.items() if n != "__metadata__"} == {
        n: v for n, v in json.loads(sound[8:header]).items() if n != "__metadata__"
    }
