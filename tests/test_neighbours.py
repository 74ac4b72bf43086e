"""Two pools in one artifact root that name the same model."""

from pathlib import Path
from typing import Any

import pytest

from sandhi_core.artifacts import Artifacts
from sandhi_core.errors import Problem
from sandhi_core.evaluation.conditions import conditions
from sandhi_core.neighbours import disturbed
from sandhi_core.pools.pool import Pool
from tests.synthetic import fingerprint, profile
from tests.walks import trajectory


def pool(name: str = "p", models: str = "ab", task: str = "task", metric: str = "acc", **sections: Any) -> Pool:
    tasks = [{"task": task, "metric": metric, "budget": 0.02}]
    entries = [{"name": m, "path": f"/models/{m}", "tasks": tasks} for m in models]
    return Pool.model_validate({"name": name, "models": entries} | sections)


def build(root: Path, made: Pool, task_files: str = "") -> None:
    """The records by which a pool is known, as its build leaves them."""
    artifacts = Artifacts(root)
    for entry in made.models:
        tasks = [[task_files + t.task, t.metric] for t in entry.tasks]
        scoring = {"tasks": tasks, "conditions": conditions(made.evaluation)}
        checkpoint = {"path": entry.path, "revision": entry.revision, "files": task_files}
        noised = {"scoring": scoring, "seeds": made.profile.seeds, "noise": made.profile.noise}
        artifacts.save(("checkpoint", entry.name), "", checkpoint, fingerprint(entry.name))
        artifacts.save(("profile", entry.name), "", noised, profile(entry.name))
        walk = trajectory(entry.name, [0.9])
        scores = {t.task: 0.9 for t in entry.tasks}
        artifacts.save(
            ("trajectory", f"{made.name}.{entry.name}"),
            "",
            {"scoring": scoring},
            walk.model_copy(update={"baseline": scores}),
        )


def told(root: Path, wanted: Pool) -> list[Problem]:
    return list(disturbed(wanted, Artifacts(root)))


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("evaluation.seed", pool("q", "bc", evaluation={"seed": 7})),
        ("evaluation.dtype", pool("q", "bc", evaluation={"dtype": "bfloat16"})),
        ("profile", pool("q", "bc", profile={"seeds": [1, 2]})),
        ("tasks", pool("q", "bc", task="another")),
        ("tasks", pool("q", "bc", metric="acc_norm")),
    ],
)
def test_a_pool_that_names_a_model_with_other_settings_is_told(tmp_path: Path, field: str, other: Pool) -> None:
    build(tmp_path, pool())
    build(tmp_path, other)
    (problem,) = told(tmp_path, pool())
    assert (problem.code, problem.severity) == ("shared-model", "warning")
    assert problem.message.startswith(f"pool q in this artifact root was built with another {field} of b: ")


def test_another_checkpoint_by_the_same_name_is_told_too(tmp_path: Path) -> None:
    build(tmp_path, pool())
    other = pool("q", "b")
    (entry,) = other.models
    build(tmp_path, other.model_copy(update={"models": (entry.model_copy(update={"path": "/other/b"}),)}))
    (problem,) = told(tmp_path, pool())
    assert "another path of b" in problem.message


def test_pools_that_agree_or_have_no_model_in_common_are_not(tmp_path: Path) -> None:
    build(tmp_path, pool())
    build(tmp_path, pool("q", "bc", evaluation={"threads": 3}))
    build(tmp_path, pool("r", "d", evaluation={"seed": 7}))
    assert told(tmp_path, pool()) == [] and told(tmp_path / "empty", pool()) == []


def test_one_who_edits_his_own_pool_file_is_told_nothing(tmp_path: Path) -> None:
    build(tmp_path, pool())
    for edited in (
        pool(evaluation={"seed": 7}),
        pool(profile={"noise": False}, search={"strategy": "ladder"}),
        pool(task="another"),
        pool(models="bcd"),
    ):
        assert told(tmp_path, edited) == []
    build(tmp_path, pool("q"), task_files="before the tasks were edited, ")
    assert told(tmp_path, pool()) == []


def test_another_pool_of_the_same_name_is_told(tmp_path: Path) -> None:
    build(tmp_path, pool(models="ab"))
    (problem,) = told(tmp_path, pool(models="cd"))
    assert (problem.code, problem.severity) == ("same-name", "warning") and "(a, b)" in problem.message
