"""Served is scored: real servers of really searched pools, held to the evaluator that scored them."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sandhi_core.evaluation.served import TEXTS, compared, prompts_of, searched
from sandhi_core.layout import read_manifest
from sandhi_core.memory import PAGE
from sandhi_core.pool import load_pool
from sandhi_core.serving.completions import Completion
from sandhi_core.serving.keeper import descendants
from sandhi_core.serving.measure import hold
from sandhi_core.verification import verify
from sandhi_core.verification_servers import Measuring
from tests.conftest import VLLM
from tests.pipelines.conftest import Line, built
from tests.searched import TASKS, searched_pool
from tests.serving.test_measure import ends_all, measurer

pytestmark = pytest.mark.slow

with_vllm = pytest.mark.usefixtures("vllm_python")
LADDER = {"profile": {"noise": False}, "search": {"strategy": "ladder"}}
PROMPTS = 50


def line(folder: Path, trained: Path, dtype: torch.dtype, **sections: Any) -> Line:
    pool = searched_pool(folder, trained, dtype, **(LADDER | sections))
    return Line(pool, folder / "root", built(pool, folder / "root"))


@pytest.fixture(scope="session")
def fp32(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    return line(tmp_path_factory.mktemp("fp32"), trained, torch.float32)


@pytest.fixture(scope="session")
def bf16(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    return line(tmp_path_factory.mktemp("bf16"), trained, torch.bfloat16)


@pytest.fixture(scope="session")
def corrected(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """In fp32, with residuals and vectors of rows."""
    sections = {"merging": {"residuals": "low_rank", "affine": "rows"}, "deploy": {"engine": "transformers"}}
    return line(tmp_path_factory.mktemp("corrected"), trained, torch.float32, **sections)


def export_of(line: Line) -> Path:
    return Path(line.result["export"])


def verified(line: Line, engine: str) -> dict[str, Any]:
    table, ok = verify(export_of(line), Measuring(engine, str(VLLM), pool=load_pool(line.pool), answers=PROMPTS))  # type: ignore[arg-type]
    assert ok and table["problems"] == [], table["problems"]
    for answers in table["answers"].values():
        assert answers["reference"] == "the search's weights"
        assert answers["prompts"] == PROMPTS and answers["tokens"] >= 8 * PROMPTS
        assert answers["equal"] and answers["different"] == answers["ties"]
    assert not descendants(os.getpid())
    return table


@pytest.mark.parametrize("kind", ["fp32", "corrected"])
def test_transformers_answer_as_the_search_scored_in_fp32(kind: str, request: pytest.FixtureRequest) -> None:
    table = verified(request.getfixturevalue(kind), "transformers")
    for answers in table["answers"].values():
        assert answers["dtype"] == "float32" and answers["different"] == 0 and answers["largest"] <= 1e-4


def test_transformers_choose_the_tokens_of_the_search_in_bf16(bf16: Line) -> None:
    table = verified(bf16, "transformers")
    assert {answers["dtype"] for answers in table["answers"].values()} == {"bfloat16"}


def test_other_weights_answer_otherwise(fp32: Line) -> None:
    """What is compared is able to differ: each model's own checkpoint in place of the merged weights."""
    export, pool = export_of(fp32), load_pool(fp32.pool)
    manifest = read_manifest(export)
    prompts = prompts_of(export, manifest, pool, 5)
    originals = {entry.name: Path(entry.path) for entry in pool.models}
    held = hold(originals, prompts=prompts)
    for name in TASKS:
        found = compared(export, manifest, name, held.completions[name], pool)
        assert not found.equal and found.largest > 0.01


def test_the_reference_is_what_the_holdout_scored(fp32: Line) -> None:
    export = export_of(fp32)
    manifest = read_manifest(export)
    for entry in load_pool(fp32.pool).models:
        directory, weights = searched(export, manifest, entry.name)
        assert directory == Path(entry.path)  # as the records say
        assert weights.key == manifest.models[entry.name].weights and weights.tensors


def test_an_export_that_lies_elsewhere_is_held_to_its_own_files(fp32: Line, tmp_path: Path) -> None:
    alone = tmp_path / "a" / "b" / "c" / "export"
    alone.parent.mkdir(parents=True)
    alone.symlink_to(export_of(fp32))
    manifest = read_manifest(alone)
    prompts = prompts_of(alone, manifest, None, 3)
    assert {len(asked) for asked in prompts.values()} == {3} and len(set(TEXTS)) >= 50
    (name, *_) = prompts
    nothing = [Completion((1, 2), (0.0,), 2)]
    found = compared(alone, manifest, name, nothing)
    assert found.reference.startswith("the exported files; the search's weights are not there: checkpoint of")
    assert not found.equal and found.tokens == found.different == 0


# --- vLLM ---------------------------------------------------------------------------------------------------


@with_vllm
@pytest.mark.timeout(1800)
def test_two_vllm_servers_answer_as_the_search_scored_and_hold_what_is_shared_once(fp32: Line) -> None:
    table = verified(fp32, "vllm")
    for answers in table["answers"].values():
        assert answers["dtype"] == "float32" and answers["different"] == 0 and answers["largest"] <= 1e-4
    memory, counted = table["memory"], table["bytes"]
    assert memory["engine"].startswith("vLLM ") and "plugin" in memory["engine"]
    assert "plugin" not in memory["originals"]["engine"]
    shared = sum(t.sharing != "private" for t in read_manifest(export_of(fp32)).models["ann"].tensors.values())
    assert counted["claimed"] - shared * PAGE <= memory["shared"] <= counted["claimed"]
    assert abs(memory["saved"] - counted["claimed"]) <= 2 * shared * PAGE
    for server in memory["servers"].values():
        first, *others = server["processes"]
        assert len(others) >= 2 and all(process["rss"] == 0 for process in others)
        assert first["shared"] >= counted["claimed"]
        assert server["requests"] == PROMPTS and server["seconds"] > 0


@with_vllm
@pytest.mark.timeout(1800)
def test_two_vllm_servers_choose_the_tokens_of_the_search_in_bf16(bf16: Line) -> None:
    export, pool = export_of(bf16), load_pool(bf16.pool)
    manifest = read_manifest(export)
    directories = {name: export / model.directory for name, model in manifest.models.items()}
    held = hold(directories, "vllm", str(VLLM), prompts=prompts_of(export, manifest, pool, PROMPTS))
    for name in TASKS:
        found = compared(export, manifest, name, held.completions[name], pool)
        assert found.equal and found.prompts == PROMPTS, found


@with_vllm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_vllm_outlives_who_measures(fp32: Line, how: signal.Signals, tmp_path: Path) -> None:
    with measurer(export_of(fp32) / "ann", "vllm", str(VLLM), tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == "starting\n"
        deadline = time.monotonic() + 300
        while len(descendants(process.pid)) < 4 and time.monotonic() < deadline:  # two keepers, two servers
            time.sleep(0.05)
        assert ends_all(process, how) == []
