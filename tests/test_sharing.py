import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from sandhi_core.checkpoints.safetensors_file import PAGE
from sandhi_core.claims import MEMORY_SHARE, claims_of
from sandhi_core.deploy.check import check_deployment
from sandhi_core.disk import verify_disk
from sandhi_core.errors import PreflightError, Problem, ProofError, UsageError
from sandhi_core.layout import read_manifest, sizes_match
from sandhi_core.memory import Holder, weight_files
from sandhi_core.pools.pool import DeploySettings
from sandhi_core.records import (
    Evaluation,
    Manifest,
    MemoryComparison,
    MergedWeights,
    SharingProof,
    TaskResult,
)
from sandhi_core.savings import savings
from sandhi_core.serving.load import load
from sandhi_core.serving.measure import Held, compare
from sandhi_core.sharing import prove
from sandhi_core.verification import servers as verification_servers
from sandhi_core.verification.exports import verify
from sandhi_core.verification.servers import Measuring
from tests.deployed import deployed
from tests.exported import EMBED, GATE, MODELS, RANKS, UP, Case, make_case, make_models, make_residual, stock

QUESTIONS = torch.arange(60).reshape(6, 10)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), hidden_size=128, intermediate_size=256)


@pytest.fixture
def case(directories: dict[str, Path], tmp_path: Path) -> Case:
    return make_case(tmp_path, directories)


def answered(model: PreTrainedModel) -> dict[str, TaskResult]:
    """One log-likelihood a question."""
    with torch.no_grad():
        logits = model(QUESTIONS).logits.log_softmax(-1)
    values = logits[:, :-1].gather(-1, QUESTIONS[:, 1:, None]).sum((1, 2)).tolist()
    return {"t": TaskResult(value=sum(values) / len(values), higher_is_better=True, questions=tuple(values))}


@pytest.fixture
def expected(case: Case) -> dict[str, Evaluation]:
    return {
        name: Evaluation(weights=f"weights of {name}", context="c", split="holdout", tasks=answered(case.swapped(name)))
        for name in MODELS
    }


def from_files(name: str, directory: Path) -> dict[str, TaskResult]:
    return answered(stock(directory))


def saved(nbytes: int, shared: int) -> MemoryComparison:
    return MemoryComparison(engine="none", originals=(), exports=(), shared=shared, saved=nbytes)


def proof_of(
    case: Case,
    expected: dict[str, Evaluation],
    merged: MergedWeights | None = None,
    in_memory: int | None = None,
    claimed: int | None = None,
    shared: int | None = None,
) -> SharingProof:
    """A proof with the memory given instead of measured."""
    counted = savings(case.assignments, case.fingerprints)
    if claimed is not None:
        counted = counted.model_copy(update={"freed": claimed})

    def given(originals: Mapping[str, Path], export_root: Path, manifest: Manifest) -> MemoryComparison:
        assert originals == {n: c.directory for n, c in case.checkpoints.items()}
        return saved(counted.net if in_memory is None else in_memory, counted.net if shared is None else shared)

    return prove(
        merged or case.export(),
        case.root,
        case.checkpoints,
        case.fingerprints,
        case.assignments,
        counted,
        expected,
        from_files,
        given,
    )


def test_a_sound_export_is_proved_with_real_processes(case: Case, expected: dict[str, Evaluation]) -> None:
    counted = savings(case.assignments, case.fingerprints)
    proof = prove(
        case.export(),
        case.root,
        case.checkpoints,
        case.fingerprints,
        case.assignments,
        counted,
        expected,
        from_files,
        compare,
    )
    assert proof.memory.shared >= MEMORY_SHARE * proof.claimed
    assert proof.problems == () and proof.passed
    assert proof.claimed == proof.verified_disk == counted.net == 3 * 256 * 128 * 4 + 64 * 128 * 4
    # pages: each of the four shards in their seven places may map one page more than its data
    assert abs(proof.verified_memory - proof.claimed) <= 7 * PAGE
    assert proof.verified_memory > MEMORY_SHARE * proof.claimed
    assert proof.questions_checked == proof.questions_equal == dict.fromkeys(MODELS, 6)
    assert proof.tensors_checked == sum(len(f.tensors) for f in case.fingerprints.values())
    assert proof.checkpoint_bytes == counted.checkpoint_bytes
    assert {p.model for p in proof.memory.exports} == set(MODELS)
    assert all(p.unmapped == 0 for p in proof.memory.originals + proof.memory.exports)


def test_a_changed_byte_fails_before_anything_is_loaded(case: Case, expected: dict[str, Evaluation]) -> None:
    merged = case.export()
    path = case.store.path(case.tensors["tied"][UP], UP)
    with path.open("r+b") as f:
        f.seek(-2, 2)
        f.write(b"\x01")
    proof = proof_of(case, expected, merged)
    assert not proof.passed
    assert len(proof.problems) == 3  # one file under three names
    assert all(f"tensor {UP}: is not the tensor that was scored" in p for p in proof.problems)
    assert proof.memory.engine.startswith("not measured")
    assert proof.verified_disk == proof.verified_memory == 0
    assert proof.questions_checked == dict.fromkeys(MODELS, 0)


def test_another_manifest_is_not_the_exported_one(case: Case, expected: dict[str, Evaluation]) -> None:
    merged = case.export().model_copy(update={"manifest": "0" * 64})
    assert [p[:8] for p in proof_of(case, expected, merged).problems] == ["manifest"]


def test_other_weights_than_the_scored_ones_fail(case: Case, expected: dict[str, Evaluation]) -> None:
    merged = case.export()
    case.tensors["single"].pop(GATE)
    (problem,) = proof_of(case, expected, merged).problems
    assert problem == "model single: the exported tensors are not the scored ones"


def test_another_name_of_weights_fails(case: Case, expected: dict[str, Evaluation]) -> None:
    expected["tied"] = expected["tied"].model_copy(update={"weights": "others"})
    (problem,) = proof_of(case, expected).problems
    assert problem == "model tied: exported as weights of tied, scored as others"


def test_other_files_than_the_checkpoints_fail(case: Case, expected: dict[str, Evaluation]) -> None:
    merged = case.export()
    tied = case.fingerprints["tied"]
    case.fingerprints["tied"] = tied.model_copy(update={"files": tied.files | {"notes.txt": "0" * 64}})
    (problem,) = proof_of(case, expected, merged).problems
    assert problem == "model tied: the exported files are not those of the checkpoint"


def test_a_missing_model_fails(case: Case, expected: dict[str, Evaluation]) -> None:
    merged = case.export()
    del case.fingerprints["tied"]
    (problem,) = proof_of(case, expected, merged).problems
    assert "exported models are ['sharded', 'single', 'tied'], the pool has ['sharded', 'single']" in problem


def changed(evaluation: Evaluation, questions: tuple[float, ...]) -> Evaluation:
    result = evaluation.tasks["t"].model_copy(update={"questions": questions})
    return evaluation.model_copy(update={"tasks": {"t": result}})


@pytest.mark.parametrize(("by", "equal"), [(1e-5, 6), (0.5, 5)])
def test_answers_are_compared_question_by_question(
    case: Case, expected: dict[str, Evaluation], by: float, equal: int
) -> None:
    first, *rest = expected["single"].tasks["t"].questions
    expected["single"] = changed(expected["single"], (first + by, *rest))
    proof = proof_of(case, expected)
    assert proof.questions_equal == {"sharded": 6, "single": equal, "tied": 6}
    assert proof.passed == (equal == 6)
    if equal < 6:
        assert "model single: transformers answers 5 of 6 holdout questions" in proof.problems[0]


def test_other_questions_are_no_answers(case: Case, expected: dict[str, Evaluation]) -> None:
    expected["single"] = changed(expected["single"], expected["single"].tasks["t"].questions[1:])
    expected["tied"] = changed(expected["tied"], ())
    proof = proof_of(case, expected)
    assert proof.questions_equal == {"sharded": 6, "single": 0, "tied": 0}
    assert len(proof.problems) == 2


def test_more_claimed_than_the_files_save_fails(case: Case, expected: dict[str, Evaluation]) -> None:
    claimed = savings(case.assignments, case.fingerprints).net
    (problem,) = proof_of(case, expected, claimed=claimed + 1).problems
    assert problem.startswith(f"{claimed + 1} bytes are claimed, the files save {claimed} (linked by hardlink;")


def test_less_saved_in_memory_than_claimed_fails(case: Case, expected: dict[str, Evaluation]) -> None:
    claimed = savings(case.assignments, case.fingerprints).net
    slack = 2 * PAGE * 10  # three private shards and seven shared ones
    least = int(MEMORY_SHARE * claimed) + 1 - slack
    assert least > claimed // 2
    assert proof_of(case, expected, in_memory=least).passed
    (problem,) = proof_of(case, expected, in_memory=least - 2).problems
    assert problem == f"{claimed} bytes are claimed, processes that load the export save {least - 2}"


def test_what_is_saved_but_not_shared_is_not_proved(case: Case, expected: dict[str, Evaluation]) -> None:
    """As where a server has died: what it held looks saved."""
    claimed = savings(case.assignments, case.fingerprints).net
    proof = proof_of(case, expected, shared=0)
    assert not proof.passed and proof.verified_memory == 0
    assert proof.problems == (f"{claimed} bytes are claimed, processes that load the export share 0",)


def test_no_more_is_verified_in_memory_than_is_claimed(case: Case, expected: dict[str, Evaluation]) -> None:
    claimed = savings(case.assignments, case.fingerprints).net
    proof = proof_of(case, expected, in_memory=claimed + 3 * PAGE)
    assert proof.passed and proof.verified_memory == claimed and proof.memory.saved == claimed + 3 * PAGE


def test_an_export_that_lost_its_links_is_not_proved(case: Case, expected: dict[str, Evaluation]) -> None:
    merged = case.export()
    copied(case.root / merged.export, case.root / "plain").rename(gone(case.root / merged.export))
    proof = proof_of(case, expected, merged)
    assert not proof.passed and proof.verified_disk == 0
    assert all("is a file of its own" in p for p in proof.problems)


# --- residuals ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """In bfloat16, as residuals are, and large enough that a page is little."""
    size = {"hidden_size": 256, "intermediate_size": 512}
    return make_models(tmp_path_factory.mktemp("halves"), torch.bfloat16, **size)


@pytest.fixture
def adjusted(halves: dict[str, Path], tmp_path: Path) -> Case:
    return make_case(tmp_path, halves, RANKS)


def loaded(name: str, directory: Path) -> dict[str, TaskResult]:
    return answered(load(directory))


def proved(case: Case) -> SharingProof:
    """With real processes. What answers the questions is given, as the search would score it."""
    expected = {
        name: Evaluation(weights=f"weights of {name}", context="c", split="holdout", tasks=answered(case.swapped(name)))
        for name in MODELS
    }
    counted = savings(case.assignments, case.fingerprints)
    return prove(
        case.export(),
        case.root,
        case.checkpoints,
        case.fingerprints,
        case.assignments,
        counted,
        expected,
        loaded,
        compare,
    )


def test_an_export_with_residuals_is_proved_net_of_them(adjusted: Case) -> None:
    counted = savings(adjusted.assignments, adjusted.fingerprints)
    assert counted.overhead == 2 * (2 * (512 + 256) + 3 * (512 + 256) + (256 + 512))
    proof = proved(adjusted)
    assert proof.problems == () and proof.passed
    assert proof.claimed == proof.verified_disk == counted.net == counted.freed - counted.overhead
    assert proof.checkpoint_bytes == counted.checkpoint_bytes
    assert proof.questions_equal == dict.fromkeys(MODELS, 6)
    assert proof.tensors_checked == sum(len(f.tensors) for f in adjusted.fingerprints.values()) + 2 * len(RANKS)
    assert all(p.unmapped == 0 for p in proof.memory.originals + proof.memory.exports)
    assert abs(proof.memory.saved - proof.claimed) <= 10 * PAGE  # ten files, of each a page more or less


def test_more_may_be_added_than_is_saved(halves: dict[str, Path], tmp_path: Path) -> None:
    case = make_case(tmp_path, halves, {(model, UP): 200 for model in MODELS})
    counted = savings(case.assignments, case.fingerprints)
    root, manifest = case.exported()
    assert counted.freed > 0 > counted.net
    assert verify_disk(root, manifest).problems == ()
    assert claims_of(manifest).claimed == counted.net


def test_claims_are_those_of_the_savings(adjusted: Case) -> None:
    claims, counted = claims_of(adjusted.exported()[1]), savings(adjusted.assignments, adjusted.fingerprints)
    assert (claims.checkpoint_bytes, claims.duplicates) == (counted.checkpoint_bytes, counted.duplicates)
    assert (claims.claimed, claims.added) == (counted.net, counted.overhead)


def test_the_files_hold_what_is_claimed(adjusted: Case) -> None:
    root, manifest = adjusted.exported()
    check, counted = verify_disk(root, manifest), savings(adjusted.assignments, adjusted.fingerprints)
    assert check.problems == ()
    assert check.tensor_bytes == counted.checkpoint_bytes + counted.overhead
    assert check.shared_bytes == counted.freed
    assert counted.checkpoint_bytes - check.distinct_bytes == counted.net


@pytest.mark.parametrize("change", ["gone", "another", "elsewhere"])
def test_other_residuals_than_the_scored_ones_fail(adjusted: Case, change: str) -> None:
    merged = adjusted.export()
    if change == "gone":
        adjusted.adjustments["single"].pop(GATE)
    elif change == "another":
        adjusted.adjustments["single"][GATE] = make_residual(adjusted.store, GATE, (512, 256), 4)
    else:
        adjusted.adjustments["sharded"] = {GATE: adjusted.adjustments["single"].pop(GATE)}
    expected = {
        name: Evaluation(weights=f"weights of {name}", context="c", split="holdout", tasks={}) for name in MODELS
    }
    problems = proof_of(adjusted, expected, merged).problems
    named = {"single", "sharded"} if change == "elsewhere" else {"single"}
    assert set(problems) == {f"model {name}: the exported tensors are not the scored ones" for name in named}


def test_verify_counts_residuals(adjusted: Case) -> None:
    table, ok = verify(deployed(adjusted))
    counted = savings(adjusted.assignments, adjusted.fingerprints)
    assert ok and table["problems"] == []
    assert table["bytes"] == {
        "checkpoints": counted.checkpoint_bytes,
        "claimed": counted.net,
        "saved": counted.net,
        "models": counted.checkpoint_bytes + counted.overhead,
        "distinct": counted.checkpoint_bytes - counted.net,
        "shared": counted.freed,
        "added": counted.overhead,
    }


def test_an_engine_that_leaves_residuals_out_is_not_deployed(adjusted: Case) -> None:
    root = edited(deployed(adjusted), lambda d: [server.update(engine="vllm") for server in d["servers"]])
    (problem,) = check_deployment(root, read_manifest(root))
    assert (problem.model, problem.severity) == ("single", "error")
    assert problem.message == "adds residuals to shared tensors, which vllm without the plugin does not apply"
    assert "deploy.engine to transformers" in problem.remedy
    adjusted.pool = adjusted.pool.model_copy(update={"deploy": DeploySettings(engine="vllm", plugin=False)})
    with pytest.raises(ProofError, match="which vllm without the plugin does not apply"):
        deployed(adjusted)


@pytest.mark.slow
def test_verify_measures_net_of_residuals(adjusted: Case) -> None:
    table, ok = verify(deployed(adjusted), Measuring())
    claimed = savings(adjusted.assignments, adjusted.fingerprints).net
    assert ok and claimed - 3 * PAGE <= table["memory"]["shared"] <= claimed
    assert all(server["unmapped"] == 0 for server in table["memory"]["servers"].values())


# --- verify -------------------------------------------------------------------------------------------------


def copied(root: Path, target: Path) -> Path:
    """As `cp -r` copies: every name becomes a file."""
    return Path(shutil.copytree(root, target))


def gone(root: Path) -> Path:
    shutil.rmtree(root)
    return root


def messages(table: Mapping[str, Any]) -> list[str]:
    return [Problem.model_validate(p).message for p in table["problems"]]


def edited(root: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    path = root / "deployment.json"
    document = json.loads(path.read_text())
    change(document)
    path.unlink()
    path.write_text(json.dumps(document))
    return root


def test_verify_tells_what_an_export_holds(case: Case) -> None:
    root = deployed(case)
    table, ok = verify(root)
    counted = savings(case.assignments, case.fingerprints)
    assert ok and table["ok"] is True and table["problems"] == []
    assert table["manifest"] == read_manifest(root).digest
    assert table["bytes"] == {
        "checkpoints": counted.checkpoint_bytes,
        "claimed": counted.net,
        "saved": counted.net,
        "models": counted.checkpoint_bytes,
        "distinct": counted.checkpoint_bytes - counted.net,
        "shared": counted.net,
        "added": 0,
    }
    assert table["models"]["tied"]["merged"] == {"tensors": 1, "bytes": 256 * 128 * 4}
    assert table["models"]["single"]["duplicate"] == {"tensors": 1, "bytes": 64 * 128 * 4}
    assert table["memory"] is None


def test_verify_takes_the_manifest_for_its_directory(case: Case) -> None:
    root = deployed(case)
    assert verify(root / "sandhi.json") == verify(root)
    with pytest.raises(ProofError, match=r"deployment.json: is a file, not the directory of an export"):
        verify(root / "deployment.json")


# --- verify: memory -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_verify_measures_what_real_processes_share(case: Case) -> None:
    table, ok = verify(deployed(case), Measuring())
    claimed = savings(case.assignments, case.fingerprints).net
    assert ok
    assert claimed - 3 * PAGE <= table["memory"]["shared"] <= claimed  # a header for each of three shared files
    memory = table["memory"]
    assert memory["servers"].keys() == set(MODELS) and memory["engine"].startswith("transformers ")
    assert all(server["requests"] == 3 and server["seconds"] > 0 for server in memory["servers"].values())
    assert all(sum(p["pss"] for p in s["processes"]) == s["pss"] for s in memory["servers"].values())
    assert memory["originals"] is None and memory["saved"] is None  # this root has no records
    warnings = [p for p in table["problems"] if p["severity"] == "warning"]
    assert [(p["code"], p["model"]) for p in warnings] == [("originals", model) for model in MODELS]


@pytest.mark.slow
def test_verify_compares_with_the_originals_that_are_given(case: Case, directories: dict[str, Path]) -> None:
    table, ok = verify(deployed(case), Measuring(originals=directories))
    claimed = savings(case.assignments, case.fingerprints).net
    assert ok and table["problems"] == []
    memory = table["memory"]
    assert abs(memory["saved"] - claimed) <= 7 * PAGE
    assert memory["originals"]["servers"].keys() == set(MODELS)
    assert memory["saved"] == memory["originals"]["sum"]["pss"] - memory["sum"]["pss"]


def test_other_checkpoints_are_no_originals(case: Case, directories: dict[str, Path]) -> None:
    root = deployed(case)
    table, ok = verify(root, Measuring(originals=directories | {"single": directories["tied"]}))
    (problem,) = table["problems"]
    assert not ok and (problem["model"], problem["tensor"]) == ("single", "lm_head.weight")
    with pytest.raises(UsageError, match="given for stranger, which the export does not hold"):
        verify(root, Measuring(originals={"stranger": directories["tied"]}))


def nothing_mapped(directories: Mapping[str, Path], *_: object, **__: object) -> Held:
    holders = tuple(Holder(name, 1, (), weight_files(path).sizes) for name, path in directories.items())
    return Held("none", holders, dict.fromkeys(directories, ()), dict.fromkeys(directories, 0.0))


def test_processes_that_share_nothing_are_a_problem(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification_servers, "hold", nothing_mapped)
    table, ok = verify(deployed(case), Measuring())
    assert not ok and table["ok"] is False
    assert table["memory"]["shared"] == 0
    assert table["memory"]["servers"]["tied"]["unmapped"] == 1
    assert messages(table)[3:] == [
        f"{savings(case.assignments, case.fingerprints).net} bytes are claimed, processes that load the export share 0"
    ]


def test_models_that_cannot_be_loaded_are_a_problem(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(*_: object, **__: object) -> Held:
        raise ProofError("stock transformers cannot load it", model="tied", remedy="mend it")

    monkeypatch.setattr(verification_servers, "hold", hold)
    table, ok = verify(deployed(case), Measuring())
    assert not ok and messages(table) == ["stock transformers cannot load it"] and table["memory"] is None


def test_what_was_measured_is_told_although_a_comparison_fails(
    case: Case, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers of the export stood, those of the originals do not start, for two reasons."""
    reasons = [Problem(code="vllm", severity="error", message=m, remedy="mend it") for m in ("first", "second")]

    def hold(given: Mapping[str, Path], *words: object, plugin: bool = True, **more: object) -> Held:
        if not plugin:
            raise PreflightError(reasons)
        return nothing_mapped(given)

    monkeypatch.setattr(verification_servers, "hold", hold)
    table, ok = verify(deployed(case), Measuring(originals=directories))
    assert not ok and messages(table)[:2] == ["first", "second"]
    assert table["memory"]["servers"].keys() == set(MODELS) and table["memory"]["originals"] is None


def test_nothing_is_loaded_from_an_export_that_is_not_sound(case: Case) -> None:
    table, ok = verify(edited(deployed(case), lambda d: d["claims"].update(claimed=1)), Measuring())
    assert not ok and table["memory"] is None


# --- verify: links ------------------------------------------------------------------------------------------


def test_a_copy_that_lost_the_links_is_a_problem(case: Case, tmp_path: Path) -> None:
    root = deployed(case)
    table, ok = verify(copied(root, tmp_path / "copy"))
    assert not ok and table["bytes"]["shared"] == 0
    problems = [p for p in table["problems"] if p["severity"] == "error"]
    assert [(p["code"], p["model"]) for p in problems] == [("export-links", "single"), ("export-links", "tied")]
    assert all("`cp -a`" in p["remedy"] for p in problems)
    tensors = read_manifest(root).models["single"].tensors
    assert problems[0]["file"] in {tensors[t].file for t in (GATE, UP, EMBED)}
    again = sum(tensors[t].nbytes for t in (GATE, UP, EMBED))
    assert f"as 2 more of this model are; the manifest says hardlink: {again} bytes" in problems[0]["message"]
    assert not sizes_match(tmp_path / "copy", read_manifest(root)) and sizes_match(root, read_manifest(root))


def test_a_build_links_again_what_a_copy_unlinked(case: Case) -> None:
    root = deployed(case)
    copied(root, case.root / "plain").rename(gone(root))
    assert case.exported()[0] == root
    assert verify_disk(root, read_manifest(root)).problems == ()


def test_a_copy_with_links_is_sound_but_its_commands_serve_from_elsewhere(case: Case, tmp_path: Path) -> None:
    root = deployed(case)
    subprocess.run(["cp", "-a", root, tmp_path / "copy"], check=True)
    table, ok = verify(tmp_path / "copy")
    assert ok and table["ok"] is True
    assert [(p["severity"], p["message"]) for p in table["problems"]] == [
        ("warning", f"its commands serve from {root}, not from here")
    ]


def test_files_declared_as_copies_are_as_declared_but_save_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", refuse)
        root = deployed(case)
    table, ok = verify(root)
    assert {row["linked"] for row in table["models"].values()} == {"copy"}
    claimed = savings(case.assignments, case.fingerprints).net
    assert not ok and messages(table) == [f"the files save 0 of {claimed} bytes"]


# --- verify: deployment -------------------------------------------------------------------------------------


Edit = Callable[[dict[str, Any]], object]
EDITS: dict[str, Edit] = {
    "pool": lambda d: d.update(pool="other"),
    "point": lambda d: d.update(point="other"),
    "claims.checkpoint_bytes": lambda d: d["claims"].update(checkpoint_bytes=1),
    "claims.duplicates": lambda d: d["claims"].update(duplicates=0),
    "claims.claimed": lambda d: d["claims"].update(claimed=d["claims"]["claimed"] + 1),
    "claims.verified_disk": lambda d: d["claims"].update(verified_disk=0),
    "claims.verified_memory": lambda d: d["claims"].update(verified_memory=d["claims"]["claimed"] + 1),
    "memory.weights_bytes_after": lambda d: d["memory"].update(weights_bytes_after=1),
    "memory.fits_before": lambda d: d["memory"].update(fits_before=False),
    "starting order": lambda d: d["servers"].reverse(),
    "servers.*.directory": lambda d: d["servers"][0].update(directory="elsewhere"),
    "servers.*.weights": lambda d: d["servers"][0].update(weights="others"),
    "servers.*.port": lambda d: d["servers"][0].update(port=1),
    "servers.*.dtype": lambda d: d["servers"][0].update(dtype="bfloat16"),
    "servers.*.max_model_len": lambda d: d["servers"][0].update(max_model_len=None),
    "servers.*.shell": lambda d: d["servers"][0].update(shell="true"),
    "servers.*.options": lambda d: d["servers"][0].update(options=["--dtype", "auto"]),
    "servers.*.memory.weights_bytes": lambda d: d["servers"][0]["memory"].update(weights_bytes=1),
    "servers.*.memory.shared_bytes": lambda d: d["servers"][0]["memory"].update(shared_bytes=1),
    "servers.*.memory.kv.layers": lambda d: d["servers"][0]["memory"]["kv"].update(layers=1),
    "servers.*.memory.after.kv_tokens": lambda d: d["servers"][0]["memory"]["after"].update(kv_tokens=1),
}


@pytest.fixture(scope="module")
def held(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """One export for all edits, and its deployment as it was written."""
    root = deployed(make_case(tmp_path_factory.mktemp("held"), directories))
    return root, (root / "deployment.json").read_bytes()


@pytest.mark.parametrize("figure", EDITS)
def test_every_figure_of_the_deployment_is_held_to_the_export(held: tuple[Path, bytes], figure: str) -> None:
    root, written = held
    (root / "deployment.json").unlink()
    (root / "deployment.json").write_bytes(written)
    first = json.loads((root / "deployment.json").read_text())["servers"][0]["model"]
    table, ok = verify(edited(root, EDITS[figure]))
    assert not ok and table["ok"] is False
    assert {(p["code"], p["file"]) for p in table["problems"]} == {("deployment", "deployment.json")}
    expected = figure.replace("*", first)
    (problem,) = [p for p in table["problems"] if p["message"].startswith(f"{expected} is ")]
    assert problem["model"] == (first if "*" in figure else None)
    assert len(table["problems"]) == 1 or figure == "starting order"


def test_what_was_measured_elsewhere_is_left_as_it_is(case: Case) -> None:
    def change(document: dict[str, Any]) -> None:
        document["claims"].update(measured_with="other processes")
        document["servers"][0].update(notes=["in other words"])
        document["memory"].update(basis="in other words")

    assert verify(edited(deployed(case), change))[0]["problems"] == []


def test_another_place_in_the_deployment_is_seen_in_every_command(case: Case) -> None:
    table, ok = verify(edited(deployed(case), lambda d: d.update(export="/elsewhere")))
    assert not ok and sum("shell is not what follows" in m for m in messages(table)) == len(MODELS)


def test_servers_are_those_of_the_export(case: Case) -> None:
    table, ok = verify(edited(deployed(case), lambda d: d["servers"].pop()))
    assert not ok and messages(table)[0].endswith("; the export holds sharded, single, tied")


def test_verify_holds_an_export_to_the_deployments_digest(case: Case) -> None:
    root = deployed(case)
    table, ok = verify(edited(root, lambda d: d.update(manifest="0" * 64)))
    assert not ok
    assert messages(table) == [f"is of manifest {'0' * 64}, the export's is {read_manifest(root).digest}"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"manifest": ""}', "[" * 5000, "\udcff"])
def test_verify_needs_a_deployment_that_can_be_read(case: Case, text: str) -> None:
    root, _ = case.exported()
    (root / "deployment.json").write_bytes(text.encode(errors="surrogateescape"))
    table, ok = verify(root)
    assert not ok and messages(table)[0].startswith("is no deployment specification: ")


def test_verify_needs_a_deployment(case: Case) -> None:
    root, _ = case.exported()
    table, ok = verify(root)
    assert not ok and messages(table) == ["is missing: nothing says that this export was proved"]
    (root / "deployment.json").symlink_to("/elsewhere")
    assert messages(verify(root)[0]) == ["is a link to nothing: nothing says that this export was proved"]


def test_a_damaged_configuration_is_told_once(case: Case) -> None:
    root = deployed(case)
    path = root / "tied" / "config.json"
    path.unlink()
    path.write_text("{")
    assert messages(verify(root)[0]) == ["differs from what was exported"]


def test_verify_knows_a_manifest_that_was_written_anew(case: Case) -> None:
    root = deployed(case)
    forged = read_manifest(root).model_copy(update={"point": "another"})
    (root / "sandhi.json").unlink()
    (root / "sandhi.json").write_bytes(forged.canonical())
    table, ok = verify(root)
    assert not ok and messages(table)[0].endswith(f"the export's is {forged.digest}")


def test_verify_needs_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(ProofError, match=r"sandhi.json: cannot be read: No such file"):
        verify(tmp_path)
