"""The pool file: what is accepted, what is refused, and where the error points."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sandhi_core.errors import PoolError
from sandhi_core.pools.pool import ModelEntry, Pool, TaskBudget, json_schema, load_pool, size_in_bytes

PATH = "    path: checkpoints/legal\n"
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
    """The problems that `text` gives, a line each, with the folder taken out of them."""
    with pytest.raises(PoolError) as caught:
        load_pool(write(folder, text))
    problems = caught.value.problems
    assert all((p.code, p.severity) == ("pool", "error") and p.remedy and "\n" not in p.line() for p in problems)
    lines = [p.line() for p in problems]
    assert str(caught.value).splitlines() == lines
    return "\n".join(lines).replace(f"{folder}/", "")


def test_everything_but_models_and_tasks_has_a_default(tmp_path: Path) -> None:
    pool = load_pool(write(tmp_path, MINIMAL))
    assert [model.name for model in pool.models] == ["legal", "medical"]
    assert pool.models[1].tasks[0].budget == 0.01  # YAML 1.1 would call 1e-2 text
    assert (pool.evaluation.splits.profile, pool.evaluation.seed) == (0.3, 42)
    assert (pool.grouping.candidates, pool.grouping.on_new_model) == ("wide", "join")
    assert (pool.search.accept, pool.search.stride, pool.search.tolerance) == ("original", "gallop", None)
    assert pool.search.early_rejection is False
    assert pool.deploy.device_bytes == 80 * 2**30


def test_a_full_pool_file_is_read_as_written(tmp_path: Path) -> None:
    text = (
        MINIMAL
        + """\
evaluation: {include_path: tasks/, batch_tokens: 64, cache_memory: 512 MiB, dtype: bfloat16, device: "cuda:1",
             threads: 2,
             splits: {profile: 0.2, search: 0.5, holdout: 0.3}, seed: 7}
profile: {seeds: [1, 2], gate: 0}
grouping: {candidates: reference, on_new_model: regroup, on_removed_model: keep}
search: {accept: reference, stride: 1, tolerance: 0.01, early_rejection: true}
merging: {methods: [mean], rescale: common}
deploy: {engine: vllm, device_memory: 1.5 GB}
rebuild: 30 3 * * 1-5
owners: [team:law, ana.b@mail.example.org]
"""
    )
    pool = load_pool(write(tmp_path, text))
    assert pool.evaluation.include_path == str(tmp_path / "tasks")
    assert (pool.evaluation.device, pool.evaluation.threads) == ("cuda:1", 2)
    assert (pool.profile.seeds, pool.profile.gate) == ((1, 2), 0.0)
    assert pool.evaluation.cache_memory == "512 MiB"
    assert pool.search.stride == 1 and pool.search.early_rejection is True
    assert pool.deploy.device_bytes == 1_500_000_000
    assert pool.rebuild == "30 3 * * 1-5"
    assert pool.owners == ("team:law", "ana.b@mail.example.org")


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pools" / "org" / "here").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    paths = ["../models/a", "org/here", "org/hub", "bert", "a/b/c", "~/m", "/abs/m", "./org"]
    entries = "".join(
        f"  - {{name: m{i}, path: '{p}', tasks: [{{task: t, metric: acc, budget: 0.1}}]}}\n"
        for i, p in enumerate(paths)
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
        (("name: legal", "nme: legal"), 3, "models[0].nme is no field of a pool file (did you mean name?)"),
        (("name: legal", "nick: legal"), 3, "models[0].name is required"),
        (("name: legal", "name: 7"), 3, "models[0].name must be text (put quotes around it)"),
        (("name: legal", "name:"), 3, "models[0].name is empty"),
        (("name: medical", "name: legal"), 7, "name 'legal' is used twice; the first is on line 3 (give each"),
        (("name: medical", "name: LEGAL"), 7, "name 'LEGAL' cannot be told from 'legal'"),
        (("budget: 0.02", "budget: 0"), 6, "models[0].tasks[0].budget must be greater than 0"),
        (("budget: 0.02", "budget: -1"), 6, "models[0].tasks[0].budget must be greater than 0"),
        (("budget: 0.02", "budget: .inf"), 6, "models[0].tasks[0].budget must be a finite number"),
        (("budget: 0.02", "budget: .nan"), 6, "models[0].tasks[0].budget must be"),
        (("budget: 0.02", "budget: true"), 6, "models[0].tasks[0].budget must be a number"),
        (("budget: 0.02", "budget: '0.02'"), 6, "models[0].tasks[0].budget must be a number (remove the quotes)"),
        (("budget: 0.02", "budget: 3%"), 6, "models[0].tasks[0].budget must be a number (write 0.03)"),
        (("budget: 0.02", "budget: '0,03'"), 6, "models[0].tasks[0].budget must be a number (write a decimal point)"),
        (("budget: 0.02", "budget:"), 6, "models[0].tasks[0].budget is empty (write a number such as 0.02)"),
        (("budget: 0.02", "budget: 0.02, budget: 0.5"), 6, "'budget' is given twice; in this line (remove one"),
        (("path: checkpoints/legal", "path: x\n    path: y"), 5, "'path' is given twice; the first is on line 4"),
        (("path: checkpoints/legal", "path: ''"), 4, "models[0].path must be text of at least one character"),
        (("task: law", "task:law"), 6, "models[0].tasks[0].task:law is no field of a pool file (put a space after"),
        (("{task: law", "{tusk: law"), 6, "models[0].tasks[0].tusk is no field of a pool file (did you mean task?)"),
        (("      - {task: law, metric: acc, budget: 0.02}\n", ""), 5, "models[0].tasks is empty (write its items as"),
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
        ("serach: {}", "serach is no field of a pool file (did you mean search?)"),
        ("evalution: {}", "evalution is no field of a pool file (did you mean evaluation?)"),
        ("colour: red", "colour is no field of a pool file (remove it; `sandhi schema`"),
        (
            "evaluation: {splits: {hold: 0.4}}",
            "evaluation.splits.hold is no field of a pool file (did you mean holdout?)",
        ),
        ("search: {accept: orginal}", "search.accept must be 'original' or 'reference' (did you mean original?)"),
        ("search: {accept: 7}", "search.accept must be 'original' or 'reference' (choose one of these)"),
        ("search:", "search is empty (write `field: value`"),
        ("profile: {seeds: 7}", "profile.seeds must be a list (write its items"),
        ("evaluation: {seed: '7'}", "evaluation.seed must be a whole number (remove the quotes)"),
        ("search: {tolerance: 0.03}", "search.tolerance is below a budget of 0.04"),
        ("search: {stride: 2}", "search.stride must be 'gallop' or 1"),
        ("search: {stride: true}", "search.stride must be gallop or 1"),
        ("search: {early_rejection: 1}", "search.early_rejection must be true or false (write true or false"),
        ("search: {early_rejection: 'true'}", "search.early_rejection must be true or false (write true or false"),
        ("search: {early_rejection:}", "search.early_rejection is empty (write true or false"),
        ("search: []", "search must be a mapping of fields to values"),
        (
            "evaluation: {splits: {profile: 0.5}}",
            "evaluation.splits profile, search and holdout must add up to 1, not 1.2 (choose three that do",
        ),
        (
            "evaluation: {splits: {profile: 0.0, search: 0.6}}",
            "evaluation.splits.profile must be greater than 0",
        ),
        ("evaluation: {batch_tokens: 0}", "evaluation.batch_tokens must be greater than or equal to 1"),
        ("evaluation: {batch_tokens: 1.5}", "evaluation.batch_tokens must be a whole number"),
        ("evaluation: {device: gpu}", "evaluation.device must be auto, cpu, mps, cuda, or cuda: and a number"),
        ("evaluation: {device: 0}", "evaluation.device must be auto, cpu, mps, cuda, or cuda: and a number"),
        ("evaluation: {seed: -1}", "evaluation.seed must be greater than or equal to 0"),
        ("evaluation: {include_path: ~no-such-user/x}", "evaluation.include_path is no usable path"),
        ("profile: {seeds: []}", "profile.seeds must list at least one"),
        ("profile: {seeds: [1, 1]}", "profile.seeds a seed is listed twice"),
        ("merging: {methods: [mean, mean]}", "merging.methods 'mean' is listed twice"),
        ("merging: {methods: []}", "merging.methods must list at least one"),
        ("merging: {methods: [ties]}", "merging.methods[0] must be 'mean', 'regmean', 'member' or 'base'"),
        ("merging: {methods: [base]}", "merging.methods: base needs merging.bases"),
        ("merging: {bases: [b]}", "merging.bases is of no use to merging.methods: mean (add base to merging.methods)"),
        ("merging: {methods: [base], bases: [b, b]}", "merging.bases 'b' is listed twice"),
        ("merging: {methods: [mean, member], rescale: common}", "rescale: common needs merging.methods: mean alone"),
        ("merging: {reform: true}", "merging.reform: true needs search.strategy: ladder, not walk"),
        ("evaluation: {cache_memory: 0MiB}", "evaluation.cache_memory must be more than nothing"),
        ("evaluation: {cache_memory: big}", "evaluation.cache_memory must be a size in MiB, GiB, MB or GB"),
        ("deploy: {device_memory: 0GiB}", "deploy.device_memory must be more than nothing"),
        ("deploy: {device_memory: 80}", "deploy.device_memory must be a size in MiB, GiB, MB or GB"),
        ("deploy: {device_memory: 80GiBs}", "deploy.device_memory must be a size in MiB, GiB, MB or GB (write a size"),
        ("owners: [nobody]", "owners[0] 'nobody' is neither a team nor an address (write team:NAME"),
        ("owners: ['team:']", "owners[0] 'team:' is neither a team nor an address"),
        ("owners: team:a", "owners must be a list"),
        ("rebuild: 0 3 * *", "rebuild has 4 fields, not five"),
        ("rebuild: 0 3 31 2 *", "rebuild is never due: no such month has that day (write five fields of cron"),
        ("rebuild: 3", "rebuild must be text"),
        ("7: x", "a key must be text (put quotes around it)"),
        ("name: again", "'name' is given twice; the first is on line 1 (remove one of them)"),
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
    assert mistakes(tmp_path, text).splitlines() == [
        "error: pool: file pool.yaml:6: models[0].tasks[0].metrc is no field of a pool file (did you mean metric?)",
        "error: pool: file pool.yaml:7: name 'legal' is used twice; the first is on line 3 (give each model a name of "
        "its own)",
        "error: pool: file pool.yaml:12: models[1].tasks[1].budget must be greater than 0 (allow at least one question "
        "to be lost: no number of questions shows that nothing changed)",
        "error: pool: file pool.yaml:13: deploy.engine must be 'vllm' or 'transformers' (choose one of these)",
        "error: pool: file pool.yaml:14: search.tolerance is below a budget of 0.02, which could never be used (raise "
        "it to the largest budget, or remove it)",
    ]


LOW_RANK = "search: {strategy: ladder}\nmerging: {residuals: low_rank}\n"


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            LOW_RANK + "deploy: {engine: sglang}\n",
            "deploy.engine must be 'vllm' or 'transformers' (choose one of these)",
        ),
        (
            LOW_RANK + "deploy: {engin: transformers}\n",
            "deploy.engin is no field of a pool file (did you mean engine?)",
        ),
        (LOW_RANK + "deploy: 7\n", "deploy must be a mapping of fields to values"),
        (
            LOW_RANK + "deploy: {adapters: {max_rank: 7}}\n",
            "deploy.adapters.max_rank must be 1, 8, 16, 32, 64, 128, 256, 320 or 512 (choose one of these: vLLM takes "
            "no others for --max-lora-rank)",
        ),
        ("serach: {strategy: ladder}\nprofile: {noise: false}\n", "serach is no field of a pool file"),
        ("search: {strategy: leader}\nprofile: {noise: false}\n", "did you mean ladder?"),
        ("strategy: ladder\nprofile: {noise: false}\n", "strategy stands in the wrong place (write it below search)"),
        ("search: {accept: refrence, tolerance: 0.001}\n", "did you mean reference?"),
        ("search: {errors: outputs}\nmerging: {methods: [mean, membr]}\n", "did you mean member?"),
        ("merging: {bases: [7], methods: [mean]}\n", "merging.bases[0] must be text"),
        ("residuals: low_rank\n", "residuals stands in the wrong place (write it below merging)"),
        ("deploy: {max_rank: 8}\n", "deploy.max_rank stands in the wrong place (write it below deploy.adapters)"),
        ("evaluation: {seeds: 3}\n", "(write it below profile, or did you mean seed?)"),
    ],
)
def test_rules_between_fields_say_nothing_of_what_is_a_mistake_by_itself(
    tmp_path: Path, sections: str, told: str
) -> None:
    (line,) = mistakes(tmp_path, MINIMAL + sections).splitlines()
    assert told in line


def test_one_mistake_is_told_as_itself(tmp_path: Path) -> None:
    with pytest.raises(PoolError) as caught:
        load_pool(write(tmp_path, MINIMAL + "serach: {}\n"))
    assert caught.value.problems == [caught.value.problem]


@pytest.mark.parametrize(
    ("metric", "budget", "remedy"),
    [
        ("acc", "5", "0.05 is 5 points"),
        ("acc", "1", "0.05 is five points"),
        ("acc", "1000", "0.05 is five points"),
        ("acc_norm", "2.5", "0.025 is 2.5 points"),
        ("'exact_match,strict-match'", "3", "0.03 is 3 points"),
        ("f1", "5", "0.05 is 5 points"),
        ("mc2", "5", "0.05 is 5 points"),
        ("prompt_level_strict_acc", "5", "0.05 is 5 points"),
    ],
)
def test_a_budget_in_points_is_no_budget(tmp_path: Path, metric: str, budget: str, remedy: str) -> None:
    text = MINIMAL.replace("metric: acc, budget: 0.02", f"metric: {metric}, budget: {budget}")
    report = mistakes(tmp_path, text)
    assert "pool.yaml:6: budget " in report and "allows any drop" in report and remedy in report


@pytest.mark.parametrize("metric", ["perplexity", "word_perplexity", "bits_per_byte", "bleu", "chrf", "ter", "score"])
def test_other_metrics_may_have_larger_budgets(tmp_path: Path, metric: str) -> None:
    text = MINIMAL.replace("metric: acc, budget: 0.02", f"metric: {metric}, budget: 5")
    assert load_pool(write(tmp_path, text + "search: {tolerance: 6}\n")).models[0].tasks[0].budget == 5


def test_a_tolerance_in_points_is_none(tmp_path: Path) -> None:
    report = mistakes(tmp_path, MINIMAL + "search: {tolerance: 5}\n")
    assert "pool.yaml:13: search.tolerance 5 allows any drop" in report and "0.05 is 5 points" in report


def test_a_tolerance_below_a_budget_is_of_use_where_drift_adds_up(tmp_path: Path) -> None:
    text = MINIMAL + "search: {tolerance: 0.005, accept: reference}\n"
    assert load_pool(write(tmp_path, text)).search.tolerance == 0.005


def test_names_that_only_differ_in_punctuation_collide(tmp_path: Path) -> None:
    text = MINIMAL.replace("name: legal", "name: a-b").replace("name: medical", "name: A_B")
    assert "name 'A_B' cannot be told from 'a-b'" in mistakes(tmp_path, text)


def entry(**budgets: float) -> ModelEntry:
    tasks = tuple(TaskBudget(task=task, metric="acc", budget=budget) for task, budget in budgets.items())
    return ModelEntry(name="m", path="org/m", tasks=tasks)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ("merging: {residuals: low_rank}\n", "merging.residuals: low_rank needs search.strategy: ladder, not walk"),
        ("merging: {affine: rows}\n", "merging.affine: rows needs search.strategy: ladder, not walk"),
        (
            "search: {strategy: ladder}\nmerging: {affine: rows}\ndeploy: {plugin: false}\n",
            "merging.affine: rows is not applied by vLLM with deploy.plugin: false",
        ),
        (
            "search: {strategy: ladder}\nmerging: {residuals: low_rank}\ndeploy: {plugin: false}\n",
            "merging.residuals: low_rank is not applied by vLLM with deploy.plugin: false",
        ),
        (
            "search: {strategy: ladder}\ngrouping: {candidates: reference}\n",
            "search.strategy: ladder needs grouping.candidates: wide, not reference",
        ),
        (
            "search: {strategy: ladder, tolerance: 0.1}\n",
            "search.tolerance: 0.1 needs search.strategy: walk, not ladder",
        ),
        (
            "search: {strategy: ladder, accept: reference}\n",
            "search.accept: reference needs search.strategy: walk, not ladder",
        ),
        ("search: {strategy: ladder, stride: 1}\n", "search.stride: 1 needs search.strategy: walk, not ladder"),
        (
            "search: {strategy: ladder, early_rejection: true}\n",
            "search.early_rejection: true needs search.strategy: walk, not ladder",
        ),
        (
            "search: {strategy: ladder}\nmerging: {methods: [member], reform: true}\n",
            "merging.reform leaves models out of averages, and merging.methods: member has none",
        ),
        (
            "grouping: {candidates: reference}\nmerging: {methods: [regmean]}\n",
            "grouping.candidates: reference needs merging.methods: mean alone, not merging.methods: regmean",
        ),
        ("profile: {noise: false}\n", "profile.noise: false needs search.strategy: ladder, not walk"),
        ("search: {errors: outputs}\n", "search.errors: outputs needs search.strategy: ladder, not walk"),
        (
            "grouping: {besides: [norms, embeddings]}\n",
            "grouping.besides: norms, embeddings needs search.strategy: ladder, not walk",
        ),
        ("grouping: {besides: [norms, norms]}\nsearch: {strategy: ladder}\n", "one of these is listed twice"),
        ("grouping: {besides: [projections]}\nsearch: {strategy: ladder}\n", "grouping.besides"),
        (
            "deploy: {adapters: {max_rank: 8}}\n",
            "deploy.adapters needs merging.residuals: low_rank, not none",
        ),
        (
            "search: {strategy: ladder}\nmerging: {residuals: low_rank}\n"
            "deploy: {engine: transformers, adapters: {max_rank: 8}}\n",
            "deploy.adapters needs deploy.engine: vllm, not transformers",
        ),
        (
            "search: {strategy: ladder}\nmerging: {residuals: low_rank, affine: rows}\ndeploy: {adapters: {}}\n",
            "deploy.adapters needs merging.affine: none, not rows",
        ),
        ("deploy: {engine: transformers, plugin: true}\n", "deploy.plugin: true needs deploy.engine: vllm"),
        (
            "search: {strategy: ladder}\nmerging: {residuals: low_rank}\ndeploy: {adapters: {}}\n",
            "a model's own engine (vllm) goes with no deploy.adapters (leave the engine out",
        ),
        ("deploy: {adapters: {max_rank: 48}}\n", "deploy.adapters.max_rank"),
        ("deploy: {adapters: {max_rank: true}}\n", "must be a rank that vLLM takes"),
        ("deploy: {adapters: {rank: 8}}\n", "deploy.adapters.rank"),
    ],
)
def test_settings_that_need_others_say_which(tmp_path: Path, sections: str, message: str) -> None:
    own = "own engine (vllm)" in message
    assert message in mistakes(tmp_path, MINIMAL.replace(PATH, PATH + "    engine: vllm\n" * own) + sections)


@pytest.mark.parametrize(
    ("own", "deploy", "engines"),
    [
        ("", "", ["vllm", "vllm"]),
        ("engine: transformers", "", ["transformers", "vllm"]),
        ("engine: vllm", "", ["vllm", "vllm"]),
        ("engine: vllm", "deploy: {engine: transformers}\n", ["vllm", "transformers"]),
    ],
)
def test_a_model_may_have_an_engine_of_its_own(tmp_path: Path, own: str, deploy: str, engines: list[str]) -> None:
    pool = load_pool(write(tmp_path, MINIMAL.replace(PATH, f"{PATH}    {own}\n") + deploy))
    assert pool.engines == dict(zip(("legal", "medical"), engines, strict=True))


@pytest.mark.parametrize(
    ("own", "deploy", "remedy"),
    [
        ("transformers", "{plugin: false}", "set deploy.engine: transformers"),  # the other is vLLM's
        ("vllm", "{engine: transformers, plugin: false}", "set engine: transformers"),
    ],
)
def test_residuals_are_applied_by_the_engine_of_every_model(tmp_path: Path, own: str, deploy: str, remedy: str) -> None:
    text = MINIMAL.replace(PATH, f"{PATH}    engine: {own}\n") + "search: {strategy: ladder}\n"
    found = mistakes(tmp_path, f"{text}merging: {{residuals: low_rank}}\ndeploy: {deploy}\n")
    assert "merging.residuals: low_rank is not applied by vLLM with deploy.plugin: false" in found and remedy in found


def test_engines_that_are_none_are_told_at_their_line(tmp_path: Path) -> None:
    found = mistakes(tmp_path, MINIMAL.replace(PATH, PATH + "    engine: [vllm]\n"))
    assert "pool.yaml:5: models[0].engine must be 'vllm' or 'transformers'" in found


@pytest.mark.parametrize("deploy", ["", "deploy: {engine: transformers}\n", "deploy: {engine: vllm, plugin: true}\n"])
def test_a_ladder_with_residuals_is_a_pool(tmp_path: Path, deploy: str) -> None:
    text = MINIMAL + (
        "search: {strategy: ladder}\nmerging: {residuals: low_rank, affine: rows}\nprofile: {noise: false}\n" + deploy
    )
    pool = load_pool(write(tmp_path, text))
    assert (pool.search.strategy, pool.merging.residuals, pool.profile.noise) == ("ladder", "low_rank", False)


@pytest.mark.parametrize("engine", ["", "engine: vllm, ", "engine: transformers, "])
def test_adapters_beside_scaled_rows_are_refused_whatever_the_engine(tmp_path: Path, engine: str) -> None:
    text = "search: {strategy: ladder}\nmerging: {residuals: low_rank, affine: rows}\n"
    found = mistakes(tmp_path, MINIMAL + text + f"deploy: {{{engine}adapters: {{}}}}\n")
    assert "set merging.affine: none, or leave deploy.adapters out" in found and "deploy.plugin" not in found


def test_adapters_are_an_engine_of_residuals(tmp_path: Path) -> None:
    text = MINIMAL + "search: {strategy: ladder}\nmerging: {residuals: low_rank}\n"
    text += "deploy: {plugin: false, adapters: {}}\n"
    adapters = load_pool(write(tmp_path, text)).deploy.adapters
    assert adapters is not None and adapters.max_rank == 64


def test_a_walk_that_compares_methods_may_leave_gradients_out(tmp_path: Path) -> None:
    text = MINIMAL + "merging: {methods: [mean, member]}\nsearch: {errors: outputs}\n"
    assert load_pool(write(tmp_path, text)).search.errors == "outputs"


def test_bases_are_paths_as_those_of_models_are(tmp_path: Path) -> None:
    text = MINIMAL + "merging: {methods: [mean, base], bases: [base, org/other]}\n"
    pool = load_pool(write(tmp_path, text))
    assert [(b.name, b.path) for b in pool.bases] == [
        ("merging.bases[0]", "base"),
        ("merging.bases[1]", "org/other"),
    ]
    (tmp_path / "base").mkdir()
    assert load_pool(write(tmp_path, text)).bases[0].path == str(tmp_path / "base")
    assert pool.merging.compares and pool.merging.weighs and not pool.merging.plain


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
