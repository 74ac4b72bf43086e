"""The pool file: what is accepted, what is refused, and where the error points."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sandhi_core.errors import PoolError
from sandhi_core.pool import ModelEntry, Pool, TaskBudget, json_schema, load_pool, size_in_bytes

MINIMAL = """\
name: specialists
models:
  - name: legal
    path: checkpoints/legal
    tasks:
      - {task: law, metric: acc, budget: 0.02}
  - name: medical
    path: org/medical
    revision: v2
    tasks:
      - {task: medicine, metric: acc, budget: 1e-2}
      - {task: anatomy, metric: acc_norm, budget: 0.04}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "pool.yaml"
    path.write_text(text)
    return path


def mistakes(folder: Path, text: str) -> str:
    """The error that `text` gives, with the folder taken out of it."""
    with pytest.raises(PoolError) as caught:
        load_pool(write(folder, text))
    assert caught.value.problem.code == "pool"
    assert caught.value.problem.remedy
    return str(caught.value).replace(f"{folder}/", "")


def test_everything_but_models_and_tasks_has_a_default(tmp_path: Path) -> None:
    pool = load_pool(write(tmp_path, MINIMAL))
    assert [model.name for model in pool.models] == ["legal", "medical"]
    assert pool.models[1].tasks[0].budget == 0.01  # YAML 1.1 would call 1e-2 text
    assert (pool.evaluation.splits.profile, pool.evaluation.seed) == (0.3, 42)
    assert (pool.grouping.candidates, pool.grouping.on_new_model) == ("wide", "join")
    assert (pool.search.accept, pool.search.stride, pool.search.tolerance) == ("original", "gallop", None)
    assert pool.deploy.device_bytes == 80 * 2**30


def test_a_full_pool_file_is_read_as_written(tmp_path: Path) -> None:
    text = (
        MINIMAL
        + """\
evaluation: {include_path: tasks/, batch_tokens: 64, dtype: bfloat16, device: "cuda:1", threads: 2,
             splits: {profile: 0.2, search: 0.5, holdout: 0.3}, seed: 7}
profile: {seeds: [1, 2], gate: 0}
grouping: {candidates: reference, on_new_model: regroup, on_removed_model: keep}
search: {accept: reference, stride: 1, tolerance: 0.01}
merging: {methods: [mean], rescale: common}
deploy: {engine: vllm, device_memory: 1.5 GB}
"""
    )
    pool = load_pool(write(tmp_path, text))
    assert pool.evaluation.include_path == str(tmp_path / "tasks")
    assert (pool.evaluation.device, pool.evaluation.threads) == ("cuda:1", 2)
    assert (pool.profile.seeds, pool.profile.gate) == ((1, 2), 0.0)
    assert pool.search.stride == 1
    assert pool.deploy.device_bytes == 1_500_000_000


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pools" / "org" / "here").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    paths = ["../models/a", "org/here", "org/hub", "bert", "a/b/c", "~/m", "/abs/m", "./org"]
    entries = "".join(
        f"  - {{name: m{i}, path: '{p}', tasks: [{{task: t, metric: acc, budget: 1}}]}}\n" for i, p in enumerate(paths)
    )
    write(tmp_path / "pools", f"name: p\nmodels:\n{entries}")
    pool = load_pool(Path("pools/pool.yaml"))
    assert [model.path for model in pool.models] == [
        str(tmp_path / "models" / "a"),
        str(tmp_path / "pools" / "org" / "here"),  # exists, so it is no hub id
        "org/hub",
        "bert",
        str(tmp_path / "pools" / "a" / "b" / "c"),  # no hub id has two slashes
        str(tmp_path / "home" / "m"),
        "/abs/m",
        str(tmp_path / "pools" / "org"),
    ]


@pytest.mark.parametrize(
    ("edit", "line", "message"),
    [
        (("name: legal", "name: le gal"), 3, "models[0].name must be letters, digits"),
        (("name: legal", "nme: legal"), 3, "models[0].nme is no field"),
        (("name: legal", "nme: legal"), 3, "models[0].name is required"),
        (("name: legal", "name: 7"), 3, "models[0].name must be text; quote it"),
        (("name: medical", "name: LEGAL"), 7, "name 'LEGAL' cannot be told from 'legal'"),
        (("budget: 0.02", "budget: 0"), 6, "models[0].tasks[0].budget must be greater than 0"),
        (("budget: 0.02", "budget: -1"), 6, "models[0].tasks[0].budget must be greater than 0"),
        (("budget: 0.02", "budget: .inf"), 6, "models[0].tasks[0].budget must be a finite number"),
        (("budget: 0.02", "budget: .nan"), 6, "models[0].tasks[0].budget must be"),
        (("budget: 0.02", "budget: true"), 6, "models[0].tasks[0].budget must be a valid number"),
        (("budget: 0.02", "budget: '0.02'"), 6, "models[0].tasks[0].budget must be a valid number"),
        (("budget: 0.02", "budget: 0.02, budget: 0.5"), 6, "'budget' is given twice"),
        (("path: checkpoints/legal", "path: ''"), 4, "models[0].path must match pattern"),
        (("path: checkpoints/legal", "path: ./legal\n    revision: v1"), 3, "revision belongs to a hub id"),
        (("task: anatomy", "task: medicine"), 10, "models[1].tasks task 'medicine' is listed twice"),
        (("name: specialists\n", ""), 1, "name is required"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, edit: tuple[str, str], line: int, message: str) -> None:
    assert edit[0] in MINIMAL
    report = mistakes(tmp_path, MINIMAL.replace(*edit))
    assert f"pool.yaml:{line}: " in report
    assert message in report


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("serach: {}", "serach is no field"),
        ("search: {tolerance: 0.03}", "search.tolerance is below a budget of 0.04"),
        ("search: {stride: 2}", "search.stride must be 'gallop' or 1"),
        ("search: {stride: true}", "search.stride must be gallop or 1"),
        ("search: []", "search must be"),
        (
            "evaluation: {splits: {profile: 0.5}}",
            "evaluation.splits profile, search and holdout must add up to 1",
        ),
        (
            "evaluation: {splits: {profile: 0.0, search: 0.6}}",
            "evaluation.splits.profile must be greater than 0",
        ),
        ("evaluation: {batch_tokens: 0}", "evaluation.batch_tokens must be greater than or equal to 1"),
        ("evaluation: {batch_tokens: 1.5}", "evaluation.batch_tokens must be a valid integer"),
        ("evaluation: {device: gpu}", "evaluation.device must match pattern"),
        ("evaluation: {seed: -1}", "evaluation.seed must be greater than or equal to 0"),
        ("evaluation: {include_path: ~no-such-user/x}", "evaluation.include_path is no usable path"),
        ("profile: {seeds: []}", "profile.seeds must list at least one"),
        ("profile: {seeds: [1, 1]}", "profile.seeds a seed is listed twice"),
        ("merging: {methods: [mean, mean]}", "merging.methods"),
        ("merging: {methods: [regmean]}", "merging.methods[0] must be 'mean'"),
        ("deploy: {device_memory: 0GiB}", "deploy.device_memory must be more than nothing"),
        ("deploy: {device_memory: 80}", "deploy.device_memory must be text"),
        ("deploy: {device_memory: 80GiBs}", "deploy.device_memory must match pattern"),
        ("7: x", "a key must be text"),
        ("name: again", "'name' is given twice"),
    ],
)
def test_a_mistake_in_a_section_points_at_it(tmp_path: Path, section: str, message: str) -> None:
    report = mistakes(tmp_path, MINIMAL + section + "\n")
    assert "pool.yaml:13: " in report
    assert message in report


def test_all_mistakes_come_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        MINIMAL.replace("name: medical", "name: legal")
        .replace("metric: acc,", "metrc: acc,", 1)
        .replace("budget: 0.04", "budget: 0")
        + "deploy: {engine: triton}\nsearch: {tolerance: 0.001}\n"
    )
    assert mistakes(tmp_path, text) == (
        "error: pool: file pool.yaml:6: 7 mistakes:\n"
        "  pool.yaml:6: models[0].tasks[0].metrc is no field of a pool file\n"
        "  pool.yaml:6: models[0].tasks[0].metric is required\n"
        "  pool.yaml:7: name 'legal' cannot be told from 'legal' in file and asset names\n"
        "  pool.yaml:12: models[1].tasks[1].budget must be greater than 0\n"
        "  pool.yaml:13: deploy.engine must be 'vllm'\n"
        "  pool.yaml:14: search.tolerance is below a budget of 0.01, which could never be used\n"
        "  pool.yaml:14: search.tolerance is below a budget of 0.02, which could never be used\n"
        " (correct the pool file; `sandhi schema` prints what may stand in it)"
    )


def test_a_tolerance_below_a_budget_is_of_use_where_drift_adds_up(tmp_path: Path) -> None:
    text = MINIMAL + "search: {tolerance: 0.005, accept: reference}\n"
    assert load_pool(write(tmp_path, text)).search.tolerance == 0.005


def test_names_that_only_differ_in_punctuation_collide(tmp_path: Path) -> None:
    text = MINIMAL.replace("name: legal", "name: a-b").replace("name: medical", "name: A_B")
    assert "name 'A_B' cannot be told from 'a-b'" in mistakes(tmp_path, text)


def entry(**budgets: float) -> ModelEntry:
    tasks = tuple(TaskBudget(task=task, metric="acc", budget=budget) for task, budget in budgets.items())
    return ModelEntry(name="m", path="org/m", tasks=tasks)


def test_tolerance_is_by_default_the_budgets(tmp_path: Path) -> None:
    model = entry(a=0.01, b=0.04)
    assert Pool(name="p", models=(model,)).tolerance(model) == {"a": 0.01, "b": 0.04}


@settings(deadline=None)
@given(
    budgets=st.dictionaries(st.sampled_from("abc"), st.floats(1e-6, 10.0), min_size=1),
    scale=st.floats(1.0, 100.0),
)
def test_a_tolerance_scales_every_budget_alike(budgets: dict[str, float], scale: float) -> None:
    model = entry(**budgets)
    search = {"tolerance": max(budgets.values()) * scale}
    tolerance = Pool.model_validate({"name": "p", "models": [model], "search": search}).tolerance(model)
    assert max(tolerance.values()) == pytest.approx(search["tolerance"])
    for task, budget in budgets.items():
        assert tolerance[task] == pytest.approx(budget * scale)


@pytest.mark.parametrize(
    ("text", "size"), [("1MiB", 2**20), ("2 GB", 2 * 10**9), ("0.5GiB", 2**29), ("80GiB", 80 * 2**30)]
)
def test_sizes(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


def test_the_schema_is_closed_and_complete() -> None:
    schema = json.loads(json.dumps(json_schema()))
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["name", "models"]
    assert set(schema["properties"]) == set(Pool.model_fields)
    for definition in schema["$defs"].values():
        assert definition["additionalProperties"] is False
    budget: dict[str, Any] = schema["$defs"]["TaskBudget"]["properties"]["budget"]
    assert (budget["type"], budget["exclusiveMinimum"]) == ("number", 0.0)


def test_what_is_written_out_again_reads_the_same(tmp_path: Path) -> None:
    pool = load_pool(write(tmp_path, MINIMAL))
    again = write(tmp_path, yaml.safe_dump(pool.model_dump(mode="json")))
    assert load_pool(again) == pool


@pytest.mark.parametrize(("threads", "accepted"), [(1, True), (1024, True), (1025, False), (0, False)])
def test_threads_are_bounded(tmp_path: Path, threads: int, accepted: bool) -> None:
    text = f"{MINIMAL}evaluation: {{threads: {threads}}}\n"
    if accepted:
        assert load_pool(write(tmp_path, text)).evaluation.threads == threads
    else:
        assert "evaluation.threads" in mistakes(tmp_path, text)
