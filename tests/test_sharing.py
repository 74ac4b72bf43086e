import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from sandhi_core import sharing
from sandhi_core.errors import ProofError
from sandhi_core.memory import PAGE
from sandhi_core.records import (
    Evaluation,
    MemoryComparison,
    MergedWeights,
    ProcessMemory,
    SharingProof,
    TaskResult,
)
from sandhi_core.savings import savings
from sandhi_core.sharing import MEMORY_SHARE, prove, verify
from tests.exported import GATE, MODELS, UP, Case, make_case, make_models, stock

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


def saved(nbytes: int) -> MemoryComparison:
    return MemoryComparison(engine="none", originals=(), exports=(), saved=nbytes)


def proof_of(
    case: Case,
    expected: dict[str, Evaluation],
    merged: MergedWeights | None = None,
    in_memory: int | None = None,
    claimed: int | None = None,
) -> SharingProof:
    """A proof with the memory given instead of measured."""
    counted = savings(case.tensors, case.fingerprints)
    if claimed is not None:
        counted = counted.model_copy(update={"freed": claimed})

    def compare(originals: Mapping[str, Path], exports: Mapping[str, Path]) -> MemoryComparison:
        assert originals == {n: c.directory for n, c in case.checkpoints.items()}
        return saved(counted.net if in_memory is None else in_memory)

    return prove(
        merged or case.export(),
        case.root,
        case.checkpoints,
        case.fingerprints,
        case.tensors,
        counted,
        expected,
        from_files,
        compare,
    )


def test_a_sound_export_is_proved_with_real_processes(case: Case, expected: dict[str, Evaluation]) -> None:
    counted = savings(case.tensors, case.fingerprints)
    proof = prove(
        case.export(),
        case.root,
        case.checkpoints,
        case.fingerprints,
        case.tensors,
        counted,
        expected,
        from_files,
    )
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
        assert "model single: stock transformers answers 5 of 6 holdout questions" in proof.problems[0]


def test_other_questions_are_no_answers(case: Case, expected: dict[str, Evaluation]) -> None:
    expected["single"] = changed(expected["single"], expected["single"].tasks["t"].questions[1:])
    expected["tied"] = changed(expected["tied"], ())
    proof = proof_of(case, expected)
    assert proof.questions_equal == {"sharded": 6, "single": 0, "tied": 0}
    assert len(proof.problems) == 2


def test_more_claimed_than_the_files_save_fails(case: Case, expected: dict[str, Evaluation]) -> None:
    claimed = savings(case.tensors, case.fingerprints).net
    (problem,) = proof_of(case, expected, claimed=claimed + 1).problems
    assert problem.startswith(f"{claimed + 1} bytes are claimed, the files save {claimed} (linked by hardlink;")


def test_less_saved_in_memory_than_claimed_fails(case: Case, expected: dict[str, Evaluation]) -> None:
    claimed = savings(case.tensors, case.fingerprints).net
    slack = 2 * PAGE * 10  # three private shards and seven shared ones
    least = int(MEMORY_SHARE * claimed) + 1 - slack
    assert least > claimed // 2
    assert proof_of(case, expected, in_memory=least).passed
    (problem,) = proof_of(case, expected, in_memory=least - 2).problems
    assert problem == f"{claimed} bytes are claimed, processes that load the export save {least - 2}"


# --- verify -------------------------------------------------------------------------------------------------


def test_verify_tells_what_an_export_holds(case: Case) -> None:
    root, manifest = case.exported()
    table, ok = verify(root)
    counted = savings(case.tensors, case.fingerprints)
    assert ok and table["problems"] == []
    assert table["manifest"] == manifest.digest
    assert table["bytes"] == {
        "models": counted.checkpoint_bytes,
        "distinct": counted.checkpoint_bytes - counted.net,
        "shared": counted.net,
    }
    assert table["models"]["tied"]["merged"] == {"tensors": 1, "bytes": 256 * 128 * 4}
    assert table["models"]["single"]["duplicate"] == {"tensors": 1, "bytes": 64 * 128 * 4}
    assert table["memory"] is None


def test_verify_measures_processes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    root, _ = case.exported()
    sizes = {"rss": 10, "private_dirty": 0, "unmapped": 1}

    def measure(directories: Mapping[str, Path]) -> tuple[ProcessMemory, ...]:
        assert directories == {name: root / name for name in MODELS}
        return tuple(ProcessMemory(model=name, pss=pss, **sizes) for pss, name in enumerate(MODELS, 5))

    monkeypatch.setattr(sharing, "measure", measure)
    table, ok = verify(root, memory=True)
    assert ok
    assert table["memory"]["processes"]["single"] == sizes | {"pss": 6}
    assert table["memory"]["saved"] == 30 - (5 + 6 + 7)


def test_verify_holds_an_export_to_the_deployments_digest(case: Case) -> None:
    root, manifest = case.exported()
    deployment = root / "deployment.json"
    deployment.write_text(json.dumps({"manifest": manifest.digest}))
    assert verify(root)[1]
    deployment.write_text(json.dumps({"manifest": "0" * 64}))
    table, ok = verify(root)
    assert not ok and table["problems"] == [f"the manifest is {manifest.digest}, deployment.json says {'0' * 64}"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"manifest": ""}'])
def test_verify_needs_a_deployment_that_can_be_read(case: Case, text: str) -> None:
    root, _ = case.exported()
    (root / "deployment.json").write_text(text)
    table, ok = verify(root)
    assert not ok and "says nothing" in table["problems"][0]


def test_verify_knows_a_manifest_that_was_written_anew(case: Case) -> None:
    root, manifest = case.exported()
    forged = manifest.model_copy(update={"point": "another"})
    (root / "sandhi.json").unlink()
    (root / "sandhi.json").write_bytes(forged.canonical())
    table, ok = verify(root)
    assert not ok and table["problems"] == [f"the manifest is {forged.digest}, the directory's name says {root.name}"]


def test_verify_needs_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(ProofError, match=r"sandhi.json: cannot be read: No such file"):
        verify(tmp_path)
