"""Models that can be adapters of no base are told so before anything is scored, with the first tensor that is why."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.errors import Problem
from sandhi_core.pools.pool import Adapters, DeploySettings, GroupingSettings, Pool
from sandhi_core.preflight.checks import check_pool
from tests.models import BUILDERS, CHARACTERS, edit_json, edit_tensors, tiny_llama, write_tokenizer
from tests.preflight.test_checks import entry

Edit = Callable[[dict[str, Tensor]], Any]
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


def moved(*names: str) -> Edit:
    return lambda tensors: [tensors[name].add_(0.5) for name in names]


def warned(
    folder: Path, directories: dict[str, Path], besides: tuple[str, ...] = (), asked: bool = True
) -> list[Problem]:
    found = {m: fingerprint(Checkpoint.open(path, m), folder / "scans") for m, path in directories.items()}
    pool = Pool(
        name="p",
        models=tuple(entry(m, path) for m, path in directories.items()),
        grouping=GroupingSettings.model_validate({"besides": besides}),
        deploy=DeploySettings(adapters=Adapters() if asked else None),
    )
    return [p for p in check_pool(pool, found, None, folder) if p.code == "no-adapters"]


def three(folder: Path, builder: Callable[..., Path] = tiny_llama, **config: Any) -> dict[str, Path]:
    """Of one base: `a` and `b` differ in projections, `c` is as `a` is."""
    made = {m: builder(folder / m, **config) for m in "abc"}
    edit_tensors(made["b"], moved("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"))
    return made


def test_models_that_differ_in_what_may_be_shared_are_not_warned_of(tmp_path: Path) -> None:
    assert warned(tmp_path, three(tmp_path)) == []


@pytest.mark.parametrize(
    ("tensor", "kinds", "others"), [(NORM, ("norms",), ("embeddings",)), (EMBEDDING, ("embeddings",), ("norms",))]
)
def test_a_norm_or_table_of_ones_own_is_named_unless_it_may_be_shared(
    tmp_path: Path, tensor: str, kinds: tuple[str, ...], others: tuple[str, ...]
) -> None:
    models = three(tmp_path)
    edit_tensors(models["c"], moved(tensor))
    for besides in ((), others):
        (problem,) = warned(tmp_path, models, besides)
        assert (problem.severity, problem.model, problem.tensor) == ("warning", "c", tensor)
        assert "differs from that of a" in problem.message and "grouping.besides: [norms" in problem.remedy
    assert warned(tmp_path, models, kinds) == []
    assert warned(tmp_path, models, asked=False) == []


def test_all_are_warned_of_where_every_norm_is_ones_own(tmp_path: Path) -> None:
    models = three(tmp_path)
    edit_tensors(models["b"], moved(NORM, "model.layers.0.input_layernorm.weight"))
    edit_tensors(models["c"], lambda t: t[NORM].mul_(3.0))
    found = [(p.model, p.tensor) for p in warned(tmp_path, models)]
    assert found == [("a", NORM), ("b", "model.layers.0.input_layernorm.weight"), ("c", NORM)]


def test_tables_of_other_vocabularies_are_never_one(tmp_path: Path) -> None:
    models = {m: path for m, path in three(tmp_path).items() if m != "b"}
    edit_tensors(models["c"], moved(EMBEDDING))
    write_tokenizer(models["c"], CHARACTERS[::-1])
    found = warned(tmp_path, models, ("norms", "embeddings"))
    assert [(p.model, p.tensor) for p in found] == [("a", EMBEDDING), ("c", EMBEDDING)]
    assert all(p.remedy == "serve it apart, or leave deploy.adapters out" for p in found)


def test_a_model_of_other_shapes_is_alone(tmp_path: Path) -> None:
    models = three(tmp_path) | {"far": tiny_llama(tmp_path / "far", hidden_size=64)}
    (problem,) = warned(tmp_path, models)
    assert (problem.model, problem.tensor) == ("far", None) and "names and shapes" in problem.message


def test_experts_are_never_shared(tmp_path: Path) -> None:
    (kind,) = [name for name in sorted(BUILDERS) if "moe" in name or "mixtral" in name][:1]
    models = {m: BUILDERS[kind](tmp_path / m) for m in "ab"}
    assert warned(tmp_path, models) == []
    private = fingerprint(Checkpoint.open(models["a"], "a"), tmp_path / "scans").private
    edit_tensors(models["b"], moved(private[-1]))
    found = warned(tmp_path, models, ("norms", "embeddings"))
    assert [(p.model, p.tensor) for p in found] == [("a", private[-1]), ("b", private[-1])]


def test_other_files_that_an_engine_reads_keep_models_apart(tmp_path: Path) -> None:
    models = three(tmp_path)
    edit_json(models["c"] / "generation_config.json", temperature=0.5)
    (problem,) = warned(tmp_path, models)
    assert problem.model == "c" and "its generation_config.json is another than that of a" in problem.message
