import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.errors import Problem
from sandhi_core.pools.pool import (
    Base,
    DeploySettings,
    EvaluationSettings,
    HoldoutSettings,
    ModelEntry,
    Pool,
    TaskBudget,
)
from sandhi_core.preflight.checks import check_base, check_model, check_pool
from sandhi_core.records import Fingerprint, Split
from sandhi_core.statistics import certifiable_budget
from tests.models import (
    BUILDERS,
    CHARACTERS,
    WEIGHTS,
    edit_json,
    edit_tensors,
    shard,
    tiny_gemma,
    tiny_llama,
    tiny_qwen2,
    write_tokenizer,
)

Counts = dict[str, dict[str, dict[Split, int]]]


def entry(name: str, directory: Path, budget: float = 0.02) -> ModelEntry:
    return ModelEntry(name=name, path=str(directory), tasks=(TaskBudget(task="quiz", metric="acc", budget=budget),))


def codes(problems: list[Problem]) -> list[tuple[str, str, str | None]]:
    """With the files' names; problems must give their whole paths."""
    assert all(p.file is None or Path(p.file).is_absolute() for p in problems)
    return [(p.severity, p.code, p.file and Path(p.file).name) for p in problems]


# --- one model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", sorted(BUILDERS))
def test_a_sound_model_has_a_fingerprint_and_no_problem(tmp_path: Path, model_type: str) -> None:
    directory = BUILDERS[model_type](tmp_path / "m")
    problems, found = check_model(entry("m", directory), tmp_path / "scans")
    assert problems == []
    assert found == fingerprint(Checkpoint.open(directory, "m"), tmp_path / "scans")


def test_without_scans_nothing_is_kept(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    with_scans = check_model(entry("m", directory), tmp_path / "scans")
    shutil.rmtree(tmp_path / "scans")
    assert check_model(entry("m", directory), None) == with_scans
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_shallow_look_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_llama(tmp_path / "m")
    edit_tensors(directory, lambda t: t["model.norm.weight"].fill_(float("nan")))
    monkeypatch.setattr(Checkpoint, "raw", lambda *_: pytest.fail("read"))
    problems, found = check_model(entry("m", directory), tmp_path / "scans", deep=False)
    assert problems == [] and found is not None
    assert not (tmp_path / "scans").exists()


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    edit_tensors(directory, lambda t: t["model.norm.weight"].fill_(float("nan")))
    edit_tensors(directory, lambda t: t["lm_head.weight"].fill_(float("inf")))
    edit_tensors(directory, lambda t: t.pop("model.layers.0.mlp.up_proj.weight"))
    edit_tensors(directory, lambda t: t.update({"model.layers.9.mlp.up_proj.weight": t["model.norm.weight"]}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "pytorch_model.bin").write_text("x")
    problems, found = check_model(entry("m", directory), tmp_path / "scans")
    assert found is None
    assert sorted((p.code, p.tensor) for p in problems if p.tensor) == [
        ("not-finite", "lm_head.weight"),
        ("not-finite", "model.layers.9.mlp.up_proj.weight"),
        ("not-finite", "model.norm.weight"),
        ("tensor-missing", "model.layers.0.mlp.up_proj.weight"),
        ("tensor-unknown", "model.layers.9.mlp.up_proj.weight"),
    ]
    assert sorted(codes([p for p in problems if not p.tensor])) == [
        ("error", "tokenizer-invalid", "tokenizer.json"),
        ("warning", "weights-ignored", "pytorch_model.bin"),
    ]
    assert all(p.model == "m" for p in problems)


def test_warnings_leave_the_fingerprint(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    (directory / "model.gguf").write_text("x")
    (directory / "optimizer.pt").write_text("x")
    problems, found = check_model(entry("m", directory), tmp_path / "scans")
    assert codes(problems) == [("warning", "weights-ignored", "model.gguf")]
    assert found is not None
    assert set(found.files) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_tied_head_with_other_bytes_is_found(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    edit_json(directory / "config.json", tie_word_embeddings=True)
    problems, _ = check_model(entry("m", directory), tmp_path / "scans")
    assert [(p.code, p.tensor) for p in problems] == [("head-differs", "lm_head.weight")]
    edit_tensors(directory, lambda t: t["lm_head.weight"].copy_(t["model.embed_tokens.weight"]))
    assert check_model(entry("m", directory), tmp_path / "scans")[0] == []


def test_tokens_without_a_row_are_warned_of(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    write_tokenizer(directory, CHARACTERS + "äöü")
    problems, found = check_model(entry("m", directory), tmp_path / "scans")
    assert codes(problems) == [("warning", "tokenizer-out-of-range", "tokenizer.json")]
    assert problems[0].message.startswith("2 tokens, such as 'ö', have no row")
    assert found is not None


def test_a_tokenizer_must_be_there(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m", tokenizer=False)
    problems, _ = check_model(entry("m", directory), tmp_path / "scans")
    assert codes(problems) == [("error", "tokenizer-missing", "tokenizer.json")]
    (directory / "tokenizer.model").write_bytes(b"sentencepiece")
    problems, _ = check_model(entry("m", directory), tmp_path / "scans")
    assert codes(problems) == [("error", "tokenizer-unusable", "tokenizer.model")]


def test_scans_that_cannot_be_written_are_a_problem_not_an_exception(tmp_path: Path) -> None:
    (tmp_path / "scans").write_text("a file")
    problems, found = check_model(entry("m", tiny_llama(tmp_path / "m")), tmp_path / "scans")
    assert [(p.severity, p.code, p.model) for p in problems] == [("error", "store", "m")]
    assert found is None


def test_code_of_the_models_own_is_mentioned_and_not_run(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    (directory / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    edit_json(directory / "config.json", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    edit_json(directory / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]})
    problems, _ = check_model(entry("m", directory), tmp_path / "scans")
    assert ("warning", "remote-code", "config.json") in codes(problems)
    assert ("warning", "remote-code", "tokenizer_config.json") in codes(problems)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("named", [None, ["LlamaForCausalLM"]])
def test_architectures_may_be_left_out(tmp_path: Path, named: list[str] | None) -> None:
    directory = tiny_llama(tmp_path / "m")
    edit_json(directory / "config.json", architectures=named)
    assert check_model(entry("m", directory), None)[0] == []


# --- the pool -----------------------------------------------------------------------------------------------


def pool_of(tmp_path: Path, models: dict[str, Path], **settings: Any) -> tuple[Pool, dict[str, Fingerprint]]:
    pool = Pool(name="p", models=tuple(entry(n, d, **settings) for n, d in models.items()))
    found = {n: fingerprint(Checkpoint.open(d, n), tmp_path / "scans") for n, d in models.items()}
    return pool, found


def twins(tmp_path: Path, **config: int) -> dict[str, Path]:
    return {name: tiny_llama(tmp_path / name, seed, **config) for seed, name in enumerate(("a", "b"))}


def counts(profile: int, search: int, holdout: int, models: str = "ab") -> Counts:
    return {m: {"quiz": {"profile": profile, "search": search, "holdout": holdout}} for m in models}


def test_a_sound_pool(tmp_path: Path) -> None:
    pool, found = pool_of(tmp_path, twins(tmp_path))
    assert check_pool(pool, found, counts(50, 50, 50), tmp_path / "not" / "there" / "yet") == []
    assert not (tmp_path / "not").exists()
    assert check_pool(pool, found, None, tmp_path) == []
    assert check_pool(pool, {}, {}, tmp_path) == []


def test_a_budget_of_exactly_one_question_is_fine_and_less_is_not(tmp_path: Path) -> None:
    pool, found = pool_of(tmp_path, twins(tmp_path), budget=0.02)
    assert check_pool(pool, found, counts(1, 50, 50), tmp_path) == []
    problems = check_pool(pool, found, {"a": counts(50, 49, 50)["a"]}, tmp_path)
    (problem,) = problems
    assert (problem.code, problem.severity, problem.model) == ("budget-too-fine", "error", "a")
    assert "one of the 49 questions of the search split; that takes 50 there, about 167 in all" in problem.message
    many = check_pool(pool, found, counts(50, 10, 20), tmp_path)
    assert sorted((p.code, p.model) for p in many) == [("budget-too-fine", m) for m in ("a", "a", "b", "b")]
    assert {p.remedy.partition("budget of ")[2] for p in many} == {"at least 0.1"}  # what both splits allow


@pytest.mark.parametrize("budget", [1 / 3, 1 / 7, 1 / 49, 0.1, 0.3])
def test_the_number_asked_for_is_enough(tmp_path: Path, budget: float) -> None:
    pool, found = pool_of(tmp_path, twins(tmp_path), budget=budget)

    def too_fine(search: int) -> list[Problem]:
        problems = check_pool(pool, found, counts(9, search, 100, "a"), tmp_path)
        return [p for p in problems if p.code == "budget-too-fine"]

    (problem,) = too_fine(1)
    needed = int(problem.message.split("that takes ")[1].split()[0])
    assert too_fine(needed) == []
    assert needed == 2 or too_fine(needed - 1) != []


@pytest.mark.parametrize("budget", [0.02, 0.05, 1 / 7])
def test_a_budget_that_the_holdout_cannot_certify_is_refused_where_it_must_be(tmp_path: Path, budget: float) -> None:
    pool, found = pool_of(tmp_path, twins(tmp_path), budget=budget)
    certified = pool.model_copy(update={"holdout": HoldoutSettings(quality="certified")})

    def refused(holdout: int) -> list[Problem]:
        problems = check_pool(certified, found, counts(99, 99, holdout, "a"), tmp_path)
        return [p for p in problems if p.code == "budget-uncertifiable"]

    (problem,) = refused(8)
    needed = int(problem.message.split("that takes ")[1].split()[0])
    assert refused(needed) == [] and refused(needed - 1) != []
    assert certifiable_budget(needed) <= budget < certifiable_budget(needed - 1)
    assert check_pool(pool, found, counts(99, 99, needed - 1, "a"), tmp_path) == []


@pytest.mark.parametrize(
    ("metric", "budget", "warned"),
    [("acc", 0.2, True), ("acc,none", 0.5, True), ("acc", 0.19, False), ("perplexity", 0.5, False), ("bleu", 5, False)],
)
def test_a_budget_of_twenty_points_is_warned_of(tmp_path: Path, metric: str, budget: float, warned: bool) -> None:
    task = TaskBudget(task="quiz", metric=metric, budget=budget)
    pool = Pool(name="p", models=(ModelEntry(name="m", path=str(tmp_path), tasks=(task,)),))
    problems = check_pool(pool, {}, None, tmp_path)
    assert [(p.severity, p.code, p.model) for p in problems] == [("warning", "budget-coarse", "m")] * warned
    assert all(f"fall by {100 * budget:g} points" in p.message for p in problems)


def test_the_same_checkpoint_twice_is_warned_of(tmp_path: Path) -> None:
    models = twins(tmp_path)
    (tmp_path / "link").symlink_to(models["a"])
    pool, found = pool_of(tmp_path, models | {"again": models["b"], "linked": tmp_path / "link"})
    problems = check_pool(pool, found, None, tmp_path)
    assert [(p.severity, p.code, p.model) for p in problems] == [
        ("warning", "same-checkpoint", "again"),
        ("warning", "same-checkpoint", "linked"),
    ]
    assert "checkpoint of b" in problems[0].message and "checkpoint of a" in problems[1].message


def test_hub_ids_are_the_same_checkpoint_in_one_revision(tmp_path: Path) -> None:
    task = (TaskBudget(task="quiz", metric="acc", budget=0.02),)
    hub = [("a", None), ("b", None), ("c", "v2")]
    entries = tuple(ModelEntry(name=n, path="no/such-model", revision=r, tasks=task) for n, r in hub)
    problems = check_pool(Pool(name="p", models=entries), {}, None, tmp_path)
    assert [(p.code, p.model) for p in problems] == [("same-checkpoint", "b")]


def test_a_device_without_room_for_one_model_is_warned_of(tmp_path: Path) -> None:
    pool, found = pool_of(tmp_path, twins(tmp_path))
    nbytes = found["a"].nbytes

    def warned(device_memory: int) -> list[str | None]:
        deploy = DeploySettings(device_memory=f"{device_memory / 10**6:.6f}MB")
        problems = check_pool(pool.model_copy(update={"deploy": deploy}), found, None, tmp_path)
        assert {(p.severity, p.code) for p in problems} <= {("warning", "device-memory")}
        return [p.model for p in problems]

    assert warned(nbytes) == []
    assert warned(nbytes - 1) == ["a", "b"]


def test_a_split_without_questions_is_refused(tmp_path: Path) -> None:
    pool, found = pool_of(tmp_path, twins(tmp_path))
    problems = check_pool(pool, found, counts(0, 50, 0, "a"), tmp_path)
    assert [(p.code, p.model) for p in problems] == [("no-questions", "a")] * 2
    assert "profile" in problems[0].message
    assert "holdout" in problems[1].message


def test_models_without_a_partner_are_warned_of(tmp_path: Path) -> None:
    models = twins(tmp_path) | {
        "c": tiny_llama(tmp_path / "c", hidden_size=64),
        "d": tiny_gemma(tmp_path / "d"),
    }
    pool, found = pool_of(tmp_path, models)
    problems = check_pool(pool, found, None, tmp_path)
    assert [(p.severity, p.code, p.model) for p in problems] == [
        ("warning", "no-partner", "c"),
        ("warning", "no-partner", "d"),
    ]
    del found["b"]  # it has problems of its own; who knows what it could share
    assert check_pool(pool, found, None, tmp_path) == []


def test_a_pool_of_one_is_warned_of(tmp_path: Path) -> None:
    pool, found = pool_of(tmp_path, {"a": tiny_llama(tmp_path / "a")})
    (problem,) = check_pool(pool, found, None, tmp_path)
    assert problem.code == "no-partner"
    assert "is the only model" in problem.message


def test_tokenizers_are_compared_by_what_they_map_not_by_size(tmp_path: Path) -> None:
    models = twins(tmp_path) | {"c": tiny_llama(tmp_path / "c", 2), "q": tiny_qwen2(tmp_path / "q")}
    write_tokenizer(models["b"], CHARACTERS[::-1])
    edit_json(models["c"] / "tokenizer.json", note="another file, the same map")
    pool, found = pool_of(tmp_path, models)
    problems = check_pool(pool, found, None, tmp_path)
    # b against a, and c and q (which can share MLPs) against b: each is told once.
    assert [(p.severity, p.code, p.model, p.file) for p in problems] == [
        ("warning", "tokenizer-differs", m, str(models[m] / "tokenizer.json")) for m in ("b", "c", "q")
    ]
    assert problems[0].message.startswith(f"numbers {len(CHARACTERS)} tokens otherwise than that of a")


def test_tokenizers_of_models_that_share_nothing_are_not_compared(tmp_path: Path) -> None:
    models = {"a": tiny_llama(tmp_path / "a"), "c": tiny_llama(tmp_path / "c", hidden_size=64)}
    write_tokenizer(models["c"], CHARACTERS[::-1])
    pool, found = pool_of(tmp_path, models)
    assert {p.code for p in check_pool(pool, found, None, tmp_path)} == {"no-partner"}


def on_device(pool: Pool, device: str) -> Pool:
    return pool.model_copy(update={"evaluation": EvaluationSettings(device=device)})


@pytest.mark.parametrize(
    ("device", "gpus", "missing"),
    [
        ("cuda", 0, True),
        ("cuda:1", 1, True),
        ("cuda:2", 2, True),
        ("mps", 1, True),
        ("cuda", 1, False),
        ("cuda:1", 2, False),
        ("cpu", 0, False),
        ("auto", 0, False),
    ],
)
def test_a_device_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, missing: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    pool, found = pool_of(tmp_path, twins(tmp_path, head_dim=32))
    problems = check_pool(on_device(pool, device), found, None, tmp_path)
    assert [(p.severity, p.code) for p in problems] == ([("error", "device-missing")] if missing else [])
    if missing:
        assert problems[0].message == f"evaluation.device is {device}, which this machine lacks"
        assert problems[0].remedy == "set evaluation.device to cpu or auto"


Usage = namedtuple("Usage", "total used free")


def test_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, found = pool_of(tmp_path, twins(tmp_path))
    total = sum(f.nbytes for f in found.values())
    slots = sum(s.nbytes for f in found.values() for s in f.slots)
    at_most, at_least = total + slots // 2, total - slots

    def severities(free: int) -> list[tuple[str, str]]:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free))
        return [(p.severity, p.code) for p in check_pool(pool, found, None, tmp_path)]

    assert severities(at_most) == []
    assert severities(at_most - 1) == severities(at_least) == [("warning", "disk-space")]
    assert severities(at_least - 1) == [("error", "disk-space")]


def test_exact_duplicates_need_room_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, found = pool_of(tmp_path, {n: tiny_llama(tmp_path / n) for n in "ab"})
    once = found["a"].nbytes - sum(s.nbytes for s in found["a"].slots)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, once))
    assert [p.severity for p in check_pool(pool, found, None, tmp_path)] == ["warning"]


def test_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    pool, found = pool_of(tmp_path, twins(tmp_path))
    (tmp_path / "file").write_text("x")
    (problem,) = check_pool(pool, found, None, tmp_path / "file" / "root")
    assert (problem.code, problem.severity, problem.file) == (
        "root-unwritable",
        "error",
        str(tmp_path / "file"),
    )


def test_splits_decide_the_questions_in_all(tmp_path: Path) -> None:
    pool, found = pool_of(tmp_path, twins(tmp_path), budget=0.02)
    splits = {"profile": 0.1, "search": 0.4, "holdout": 0.5}
    wider = pool.model_copy(update={"evaluation": EvaluationSettings.model_validate({"splits": splits})})
    (problem,) = check_pool(wider, found, counts(50, 50, 10, "a"), tmp_path)
    assert "that takes 50 there, about 100 in all" in problem.message


def test_shards_do_not_matter(tmp_path: Path) -> None:
    directory = shard(tiny_llama(tmp_path / "m"), 4)
    assert check_model(entry("m", directory), tmp_path / "scans")[0] == []
    assert not (directory / WEIGHTS).exists()


# --- bases --------------------------------------------------------------------------------------------------

BASE = "merging.bases[0]"


def test_a_base_needs_no_tokenizer_but_sound_weights(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "base", tokenizer=False)
    problems, found = check_base(Base(BASE, str(directory)), tmp_path / "scans")
    assert problems == [] and found == fingerprint(Checkpoint.open(directory, BASE), tmp_path / "scans")
    edit_tensors(directory, lambda t: t["model.norm.weight"].fill_(float("nan")))
    problems, found = check_base(Base(BASE, str(directory)), tmp_path / "scans")
    assert found is None and [(p.code, p.model, p.tensor) for p in problems] == [
        ("not-finite", BASE, "model.norm.weight")
    ]
    for path, code in ((str(tmp_path / "none"), "directory-missing"), ("org/none", "hub-not-cached")):
        problems, found = check_base(Base(BASE, path), None)
        assert found is None and [(p.code, p.model) for p in problems] == [(code, BASE)]
        assert problems[0].line().startswith(f"error: {code}: {BASE}: ") and "model's" not in problems[0].remedy


def test_a_base_must_fit_some_group(tmp_path: Path) -> None:
    pool, found = pool_of(tmp_path, twins(tmp_path))
    directories = {
        "fits": tiny_llama(tmp_path / "fits", 7),
        "deeper": tiny_llama(tmp_path / "deeper", num_hidden_layers=3),
        "wide": tiny_llama(tmp_path / "wide", hidden_size=64),
        "single": tiny_llama(tmp_path / "single", dtype=torch.float32),
    }
    bases = {n: fingerprint(Checkpoint.open(d, n), tmp_path / "scans") for n, d in directories.items()}
    problems = check_pool(pool, found, None, tmp_path, bases)
    assert [(p.severity, p.code, p.model) for p in problems] == [
        ("error", "base-fits-nothing", "wide"),
        ("error", "base-fits-nothing", "single"),
    ]
    assert check_pool(pool, {"a": found["a"]}, None, tmp_path, bases) == []  # of others it is not known
