"""One `sandhi check` of a pool in which every model is a bad checkpoint of its own: each is told, all at once."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from sandhi_core.codes import rank
from tests.evaluation.local_tasks import choice_task
from tests.hostile.broken import Refused
from tests.hostile.neighbours import NEIGHBOURS
from tests.hostile.reported import REPORTED
from tests.models import tiny_llama
from tests.pipelines.conftest import sandhi

CASES = {**REPORTED, **NEIGHBOURS}
NAMES = {case: f"m{at}" for at, case in enumerate(CASES)}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command answers; it writes nothing but notes below its root."""
    folder = tmp_path_factory.mktemp("refused")
    choice_task(folder / "tasks")
    for case, name in NAMES.items():
        CASES[case].make(folder / name)
    (tiny_llama(folder / "sound") / "model.gguf").write_bytes(b"GGUF")
    tasks = [{"task": "letters", "metric": "acc", "budget": 0.15}]
    models = [{"name": n, "path": str(folder / n), "tasks": tasks} for n in [*NAMES.values(), "sound"]]
    pool = {"name": "bad", "models": models, "evaluation": {"include_path": "tasks", "device": "cpu"}}
    (folder / "pool.yaml").write_text(yaml.safe_dump(pool))
    status, out, err = sandhi("check", folder / "pool.yaml", "--root", folder / "root", "--json")
    assert status == 1 and "Traceback" not in err
    return {"folder": folder, **json.loads(out)}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_checkpoint_is_one_clear_error(report: dict[str, Any], case: str) -> None:
    expected: Refused = CASES[case]
    directory: Path = report["folder"] / NAMES[case]
    told = [p for p in report["problems"] if p["model"] == NAMES[case] and p["severity"] == "error"]
    assert {p["code"] for p in told} == set(expected.codes), told
    file = None if expected.file is None else str(directory / expected.file)
    assert [
        p
        for p in told
        if p["code"] in expected.codes
        and (file is None or p["file"] == file)
        and p["tensor"] == expected.tensor
        and expected.message in p["message"]
        and expected.remedy in p["remedy"]
    ], told


def test_errors_come_before_warnings_and_the_worst_first(report: dict[str, Any]) -> None:
    assert report["ok"] is False
    order = [(p["severity"] != "error", rank(p["code"])) for p in report["problems"]]
    assert order == sorted(order) and len({severity for severity, _ in order}) == 2


def test_each_is_told_of_its_own_model_and_once(report: dict[str, Any]) -> None:
    told: dict[str, list[str]] = defaultdict(list)
    for problem in report["problems"]:
        told[problem["model"]].append(json.dumps(problem, sort_keys=True))
        assert problem["message"] and problem["remedy"] and problem["file"]
    assert set(told) >= set(NAMES.values())
    assert all(len(lines) == len(set(lines)) for lines in told.values())
    assert [g["models"] for g in report["plan"]["groups"]] == [["sound"]]  # nothing else would be scored


def test_checkpoints_are_left_as_they_were_and_nothing_is_run(report: dict[str, Any]) -> None:
    folder: Path = report["folder"]
    assert {p.name for p in folder.iterdir() if p.name.startswith("m") and not p.name.endswith("-blobs")} == set(
        NAMES.values()
    )
    assert not (folder / "root" / "evaluations").exists()
