"""What an engine would serve wrongly or not at all is told before anything is scored."""

from pathlib import Path
from typing import Any

import pytest

from sandhi_core.errors import Problem
from sandhi_core.pools.pool import DeploySettings, Engine, EvaluationSettings, MergingSettings
from sandhi_core.preflight.checks import check_pool
from tests.models import tiny_llama
from tests.preflight.test_checks import pool_of


def warned(folder: Path, engines: dict[str, Engine], **sections: Any) -> list[Problem]:
    """Of two that could share, and `wide`, which shares nothing; the latter has heads that vLLM lacks on a CPU."""
    models = {name: tiny_llama(folder / name, seed, head_dim=32) for seed, name in enumerate("ab")}
    models["wide"] = tiny_llama(folder / "wide", 2, hidden_size=96, head_dim=24)
    pool, found = pool_of(folder, models)
    entries = tuple(entry.model_copy(update={"engine": engines.get(entry.name)}) for entry in pool.models)
    problems = check_pool(pool.model_copy(update={"models": entries, **sections}), found, None, folder)
    assert all(problem.severity == "warning" for problem in problems)
    return [problem for problem in problems if problem.code != "no-partner"]


ON_CPU = EvaluationSettings(device="cpu")


def test_heads_that_vllm_lacks_on_a_cpu(tmp_path: Path) -> None:
    (problem,) = warned(tmp_path, {}, evaluation=ON_CPU)
    assert (problem.code, problem.model) == ("heads-beyond-cpu", "wide")
    assert problem.message == "its attention heads have 24 elements, which vLLM takes on a GPU only"
    assert "`engine: transformers`" in problem.remedy


@pytest.mark.parametrize(
    ("engines", "sections"),
    [
        ({"wide": "transformers"}, {"evaluation": ON_CPU}),
        ({}, {"evaluation": ON_CPU, "deploy": DeploySettings(engine="transformers")}),
        ({}, {}),  # by device: auto nobody knows
    ],
)
def test_heads_of_no_matter(tmp_path: Path, engines: dict[str, Engine], sections: dict[str, Any]) -> None:
    assert warned(tmp_path, engines, **sections) == []


@pytest.mark.parametrize("merging", [{"residuals": "low_rank"}, {"affine": "rows"}])
def test_what_transformers_serve_would_leave_out(tmp_path: Path, merging: dict[str, Any]) -> None:
    own: dict[str, Engine] = {"b": "transformers", "wide": "transformers"}  # the latter has nothing to add to
    (problem,) = warned(tmp_path, own, merging=MergingSettings(**merging))
    assert (problem.code, problem.model) == ("additions-left-out", "b")
    assert "`sandhi serve` will refuse it" in problem.message
    whole = warned(tmp_path, {}, merging=MergingSettings(**merging), deploy=DeploySettings(engine="transformers"))
    assert [problem.model for problem in whole] == ["a", "b"]


def test_without_corrections_nothing_is_left_out(tmp_path: Path) -> None:
    assert warned(tmp_path, {"a": "transformers"}) == []
