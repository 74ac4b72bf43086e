import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from sandhi_core.errors import ProofError, UsageError
from sandhi_core.memory import Holder
from sandhi_core.pools.pool import DeploySettings
from sandhi_core.serving.measure import Held
from sandhi_core.verification import servers
from sandhi_core.verification.arguments import ANSWERS, add_arguments, originals_given
from sandhi_core.verification.exports import verify, verify_all
from sandhi_core.verification.originals import originals_of
from sandhi_core.verification.servers import Measuring
from sandhi_core.verification.told import tell
from tests.deployed import deployed
from tests.exported import MODELS, Case, make_case, make_models


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), torch.bfloat16)


@pytest.fixture
def case(directories: dict[str, Path], tmp_path: Path) -> Case:
    return make_case(tmp_path, directories)


def arguments(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def test_one_export_answers_with_its_table(case: Case) -> None:
    root = deployed(case)
    document, tables = verify_all(arguments(root))
    assert [document] == tables and document == verify(root)[0]


def test_several_exports_answer_with_one_document(case: Case, tmp_path: Path, directories: dict[str, Path]) -> None:
    other = make_case(tmp_path / "other", directories)
    good, bad = deployed(case), deployed(other)
    (bad / "deployment.json").unlink()
    document, tables = verify_all(arguments(good, bad))
    assert document["exports"] == tables and [table["ok"] for table in tables] == [True, False]
    assert not document["ok"] and document["problems"] == tables[1]["problems"]


def test_an_export_without_a_manifest_does_not_keep_others_from_being_looked_at(
    case: Case, tmp_path: Path, directories: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = deployed(case), deployed(make_case(tmp_path / "other", directories))
    bad.joinpath("sandhi.json").chmod(0o644)
    bad.joinpath("sandhi.json").write_text("")
    document, tables = verify_all(arguments(bad, good, tmp_path / "none"))
    assert [table["ok"] for table in tables] == [False, True, False] and not document["ok"]
    assert [problem["file"] for problem in document["problems"]] == [
        str(bad / "sandhi.json"), str(tmp_path / "none" / "sandhi.json")
    ]  # fmt: skip
    for table in tables:
        tell(table)
    printed = capsys.readouterr()
    assert str(good) in printed.out and str(bad / "sandhi.json") in printed.err
    with pytest.raises(ProofError, match="no manifest"):
        verify_all(arguments(bad))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--answers"], "--answers needs --engine"),
        (["--pool", "/pool.yaml"], "--pool needs --engine"),
        (["--originals", "a=/b"], "--originals needs --engine"),
        (["--python", sys.executable], "--python needs --engine"),
        (["--engine", "transformers", "--python", sys.executable], "--python is of vLLM"),
        (["--engine", "vllm", "--python", "/nowhere/python"], "'/nowhere/python' is no program"),
        (["--engine", "transformers", "--answers", "-1"], "--answers -1 is no number of prompts"),
        (["--engine", "transformers", "--originals", "a"], "--originals 'a' is no MODEL=DIRECTORY"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused_before_anything_is_read(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        verify_all(arguments("/no/such/export", *words))


def test_answers_says_how_many_or_fifty() -> None:
    assert arguments("e").answers == 0
    assert arguments("e", "--answers").answers == ANSWERS == 50
    assert arguments("e", "--answers", "7").answers == 7


def test_originals_are_given_once_each(tmp_path: Path) -> None:
    assert originals_given(["a=/x", "b=/y=z"]) == {"a": Path("/x"), "b": Path("/y=z")}
    with pytest.raises(UsageError, match="gives a twice"):
        originals_given(["a=/x", "a=/y"])


def test_originals_come_from_the_pool_or_are_not_known(case: Case) -> None:
    root, manifest = case.exported()
    found, problems = originals_of(root, manifest, {}, case.pool)
    assert found == {name: checkpoint.directory for name, checkpoint in case.checkpoints.items()} and problems == []
    found, problems = originals_of(root, manifest, {})
    assert found == {} and [(p.severity, p.model) for p in problems] == [("warning", name) for name in MODELS]
    assert all("checkpoint of" in problem.message and "--originals" in problem.remedy for problem in problems)


def test_memory_is_measured_where_no_answers_can_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = make_models(tmp_path / "models", torch.float64, head_dim=32)
    made = make_case(tmp_path, models)
    made.pool = made.pool.model_copy(update={"deploy": DeploySettings(engine="transformers")})
    asked: list[object] = []

    def hold(given: Mapping[str, Path], *_: object, prompts: object = None, **__: object) -> Held:
        asked.append(prompts)
        holders = tuple(Holder(name, 1, (), {}) for name in given)
        return Held("none", holders, dict.fromkeys(given, ()), dict.fromkeys(given, 0.0))

    monkeypatch.setattr(servers, "hold", hold)
    table, ok = verify(deployed(made), Measuring(answers=3))
    (problem,) = (problem for problem in table["problems"] if problem["code"] == "proof")
    assert problem["message"] == "has weights in F64, and answers are compared in float32, bfloat16, float16 alone"
    assert not ok and asked == [None] and table["answers"] is None
    assert table["memory"]["servers"].keys() == set(MODELS)
