"""Served is scored: real servers of really searched pools, held to the evaluator that scored them."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sandhi_core.artifacts import Artifacts
from sandhi_core.assignment import factors_among
from sandhi_core.checkpoints.safetensors_file import PAGE
from sandhi_core.errors import ProofError, ServingError, UsageError
from sandhi_core.layout import read_manifest
from sandhi_core.pools.pool import load_pool
from sandhi_core.records import Manifest, SharingProof
from sandhi_core.rungs.allotment import PRICES
from sandhi_core.serving import measure as measuring
from sandhi_core.serving.completions import Completion, fetch
from sandhi_core.serving.keeper import descendants
from sandhi_core.serving.measure import NEW_TOKENS, Held, hold, served_from
from sandhi_core.serving.together import Served
from sandhi_core.verification import answers as module
from sandhi_core.verification.answers import TEXTS, Compared, compared, prompts_of, require_comparable, searched
from sandhi_core.verification.exports import verify
from sandhi_core.verification.servers import Measuring
from tests.conftest import VLLM
from tests.pipelines.conftest import Line, built, line_alone
from tests.processes import left
from tests.searched import TASKS, searched_pool
from tests.serving.test_measure import ends_all, measurer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # builds and servers of fixtures are in the first test's

with_vllm = pytest.mark.usefixtures("vllm_python")
LADDER = {"profile": {"noise": False}, "search": {"strategy": "ladder"}}
CORRECTED = {"merging": {"residuals": "low_rank", "affine": "rows"}}
PROMPTS = 50


@dataclass(frozen=True)
class Proved:
    """A pool that was built, and what the servers of its proof held and answered: those of the originals, and of the
    export, which were asked questions of the pool's tasks."""

    line: Line
    held: Mapping[str, Held]


def line(
    folder: Path, trained: Path, dtype: torch.dtype, vllm: Path | None = None, kin: bool = False, **sections: Any
) -> Line:
    pool = searched_pool(folder, trained, dtype, kin=kin, **(LADDER | sections))
    return Line(pool, folder / "root", built(pool, folder / "root", vllm=vllm))


@pytest.fixture(scope="session")
def fp32(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    with line_alone():
        return line(tmp_path_factory.mktemp("fp32"), trained, torch.float32)


@pytest.fixture(scope="session")
def bf16(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    with line_alone():
        return line(tmp_path_factory.mktemp("bf16"), trained, torch.bfloat16)


@pytest.fixture(scope="session")
def proved(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Proved:
    """In fp32, with residuals and vectors of rows; proved with vLLM where there is one. The proof's own servers are
    asked what is compared: others would take a minute to start."""
    folder, held = tmp_path_factory.mktemp("corrected"), {}

    def asking(directories: Mapping[str, Path], *words: Any, plugin: bool = True, **more: Any) -> Held:
        if plugin:
            root = next(iter(directories.values())).parent
            more["prompts"] = prompts_of(root, read_manifest(root), load_pool(folder / "searched.yaml"), PROMPTS)
        found = hold(directories, *words, plugin=plugin, **more)
        held["export" if plugin else "originals"] = found
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "hold", asking)
        # Models that answer by chance stand on anything: without bold rungs residuals are left.
        patch.setattr("assets.trajectory.PRICES", tuple(price for price in PRICES if price < 4))
        made = line(folder, trained, torch.float32, VLLM if VLLM.exists() else None, kin=True, **CORRECTED)
    return Proved(made, held)


@pytest.fixture
def corrected(proved: Proved) -> Line:
    line = proved.line
    for model in export_of(line)[1].models.values():
        added = factors_among(model.tensors)
        assert any(name.endswith("lora_B.weight") for name in added) and any(
            name.endswith("row_scale") for name in added
        )
    return line


def export_of(line: Line) -> tuple[Path, Manifest]:
    root = Path(line.result["export"])
    return root, read_manifest(root)


def answers_of(line: Line, completions: Mapping[str, tuple[Completion, ...]]) -> dict[str, Compared]:
    root, manifest = export_of(line)
    return {name: compared(root, manifest, name, completions[name], load_pool(line.pool)) for name in TASKS}


def verified(line: Line, engine: str) -> dict[str, Compared]:
    root, _ = export_of(line)
    table, ok = verify(root, Measuring(engine, pool=load_pool(line.pool), answers=PROMPTS))  # type: ignore[arg-type]
    assert ok and table["problems"] == [], table["problems"]
    assert not left()
    return {name: Compared(**found) for name, found in table["answers"].items()}


def require_all(found: Mapping[str, Compared], dtype: str) -> None:
    for answers in found.values():
        assert answers.reference == "the search's weights" and answers.dtype == dtype
        assert answers.prompts == PROMPTS and answers.tokens == NEW_TOKENS * PROMPTS


def require_equal(found: Mapping[str, Compared]) -> None:
    require_all(found, "float32")
    assert all(a.equal and a.different == 0 and a.largest <= 1e-4 for a in found.values()), found


# --- transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp32", "corrected"])
def test_transformers_answer_as_the_search_scored_in_fp32(kind: str, request: pytest.FixtureRequest) -> None:
    require_equal(verified(request.getfixturevalue(kind), "transformers"))


def test_transformers_choose_the_tokens_of_the_search_in_bf16(bf16: Line) -> None:
    found = verified(bf16, "transformers")
    require_all(found, "bfloat16")
    for answers in found.values():  # 2 others, nearly tied, and 0.052 when this was written
        assert answers.equal and answers.different <= 6 and answers.largest <= 0.15, answers


def test_other_weights_answer_otherwise(bf16: Line) -> None:
    """What is compared is able to differ: each model's own checkpoint in place of the merged weights."""
    pool = load_pool(bf16.pool)
    prompts = prompts_of(*export_of(bf16), pool, 5)
    held = hold({entry.name: Path(entry.path) for entry in pool.models}, prompts=prompts)
    for answers in answers_of(bf16, held.completions).values():
        assert not answers.equal and answers.largest > 1 and answers.different - answers.ties > 5, answers


def test_the_reference_is_what_the_holdout_scored(fp32: Line) -> None:
    root, manifest = export_of(fp32)
    for entry in load_pool(fp32.pool).models:
        directory, weights = searched(root, manifest, entry.name)
        assert directory == Path(entry.path)  # as the records say
        assert weights.key == manifest.models[entry.name].weights and weights.tensors


def test_an_export_that_lies_elsewhere_is_held_to_its_own_files(fp32: Line, tmp_path: Path) -> None:
    alone = tmp_path / "a" / "b" / "c" / "export"
    alone.parent.mkdir(parents=True)
    alone.symlink_to(export_of(fp32)[0])
    manifest = read_manifest(alone)
    prompts = prompts_of(alone, manifest, None, 3)
    assert {len(asked) for asked in prompts.values()} == {3} and len(set(TEXTS)) >= 50
    (name, *_) = prompts
    found = compared(alone, manifest, name, [Completion((1, 2), (0.0,), 2)])
    assert found.reference.startswith("the exported files; the search's weights are not there: checkpoint of")
    assert not found.equal and found.tokens == found.different == 0


# --- what is no evidence ------------------------------------------------------------------------------------


def test_no_completion_is_no_equality(fp32: Line) -> None:
    root, manifest = export_of(fp32)
    found = compared(root, manifest, "ann", [], load_pool(fp32.pool))
    assert found.prompts == 0 and not found.equal


def test_fewer_prompts_than_asked_for_are_said(fp32: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    root, _ = export_of(fp32)
    monkeypatch.setattr(module, "TEXTS", TEXTS[:2])
    table, ok = verify(root, Measuring(answers=3))
    assert ok and [(p["severity"], p["model"]) for p in table["problems"]] == [("warning", name) for name in TASKS]
    assert table["problems"][0]["message"] == "there are 2 prompts for it, 3 were to be compared"
    monkeypatch.setattr(module, "TEXTS", ())
    table, ok = verify(root, Measuring(answers=3))
    assert not ok and {p["message"] for p in table["problems"]} == {
        "nothing was asked: there is no prompt of two tokens"
    }


def test_answers_need_what_scores(fp32: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the wheel alone is installed."""
    monkeypatch.setitem(sys.modules, "sandhi_core.verification.answers", None)
    with pytest.raises(UsageError, match=r"--answers needs what scores models.*sandhi\[pipeline\]"):
        verify(export_of(fp32)[0], Measuring(answers=3))


def test_a_dtype_in_which_nothing_is_compared_is_refused(fp32: Line) -> None:
    _, manifest = export_of(fp32)
    model = manifest.models["ann"]
    tensors = {name: tensor.model_copy(update={"dtype": "F64"}) for name, tensor in model.tensors.items()}
    double = manifest.model_copy(update={"models": {"ann": model.model_copy(update={"tensors": tensors})}})
    with pytest.raises(ProofError, match="model ann: has weights in F64, and answers are compared in float32, "):
        require_comparable(double)


# --- vLLM ---------------------------------------------------------------------------------------------------


@with_vllm
def test_two_vllm_servers_answer_as_the_search_scored_in_fp32_with_residuals(proved: Proved, corrected: Line) -> None:
    held = proved.held["export"]
    require_equal(answers_of(corrected, held.completions))
    assert held.engine.startswith("vLLM ") and all(0 < seconds < 60 for seconds in held.seconds.values())


@with_vllm
def test_two_engines_answer_as_the_search_scored_in_fp32(fp32: Line, tmp_path: Path) -> None:
    """`sandhi verify --engine vllm` of a pool that gives a model to transformers, built anew from what was built."""
    document = yaml.safe_load(fp32.pool.read_text())
    document["models"][1]["engine"] = "transformers"
    pool, root = tmp_path / "pool.yaml", tmp_path / "root"
    pool.write_text(yaml.safe_dump(document))
    subprocess.run(["cp", "-a", fp32.root, root], check=True)
    with line_alone():
        mixed = Line(pool, root, built(pool, root))
    assert {stage for stage, _ in mixed.document["ran"]} == {"sharing_proof", "deployment"}
    assert export_of(mixed)[1] == export_of(fp32)[1]
    table, ok = verify(export_of(mixed)[0], Measuring("vllm", str(VLLM), pool=load_pool(mixed.pool), answers=PROMPTS))
    assert ok, table["problems"]
    require_equal({name: Compared(**found) for name, found in table["answers"].items()})
    for held in (table["memory"], table["memory"]["originals"]):
        first, second = held["engine"].split("; ")
        assert first.startswith("vLLM ") and second.startswith("ben: transformers ")
    assert (
        len(table["memory"]["servers"]["ann"]["processes"]) > len(table["memory"]["servers"]["ben"]["processes"]) == 1
    )


@with_vllm
def test_a_pool_is_proved_with_the_vllm_that_it_is_deployed_on(proved: Proved) -> None:
    root, manifest = export_of(proved.line)
    proof = Artifacts(proved.line.root).load(SharingProof, "sharing_proof", manifest.pool)
    assert proof.passed and proof.memory.engine == proved.held["export"].engine and "plugin" in proof.memory.engine
    assert "plugin" not in proved.held["originals"].engine
    assert json.loads((root / "deployment.json").read_text())["claims"]["measured_with"] == proof.memory.engine
    files = sum(t.sharing != "private" for t in manifest.models["ann"].tensors.values())
    assert proof.claimed - files * PAGE <= proof.memory.shared <= proof.claimed
    assert proof.verified_memory >= 0.9 * proof.claimed
    first = {process.model: process for process in reversed(proof.memory.exports)}
    others = [process for process in proof.memory.exports if process not in first.values()]
    assert len(others) >= 4 and all(process.rss == 0 for process in others)
    assert all(process.shared >= proof.claimed for process in first.values())
    assert not left()


@with_vllm
def test_two_vllm_servers_choose_the_tokens_of_the_search_in_bf16(bf16: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    root, manifest = export_of(bf16)
    prompts = prompts_of(root, manifest, load_pool(bf16.pool), PROMPTS)
    closed: list[str] = []
    asked = measuring._asked

    def asking(server: Served, given: Any) -> tuple[Completion, ...]:
        closed.append(answered(server))
        return asked(server, given)

    monkeypatch.setattr(measuring, "_asked", asking)
    held = hold(served_from(root, manifest), "vllm", str(VLLM), prompts=prompts)
    found = answers_of(bf16, held.completions)
    require_all(found, "bfloat16")
    for answers in found.values():  # 14 and 17 others, nearly tied, and 0.38 when this was written
        assert answers.equal and answers.different <= 30 and answers.largest <= 0.5, answers
    assert len(closed) == 2 and all("answers 404" in said for said in closed)  # nobody calls into its workers


def answered(server: Served) -> str:
    """What a server says to whoever would call a function of its workers."""
    with pytest.raises(ServingError) as refused:
        fetch(f"{server.url}/collective_rpc", server.model, {"method": "check_health"})
    return str(refused.value)


@with_vllm
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_vllm_outlives_who_measures(bf16: Line, how: signal.Signals, tmp_path: Path) -> None:
    with measurer(export_of(bf16)[0] / "ann", "vllm", str(VLLM), tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == "starting\n"
        deadline = time.monotonic() + 300
        while len(descendants(process.pid)) < 4 and time.monotonic() < deadline:  # two keepers, two servers
            time.sleep(0.05)
        assert ends_all(process, how) == []
