"""What lies beside the projections: which of it means the same, whose tokens are the same, how it joins groups."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from sandhi_core.checkpoints.architectures import ORDER
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.graph import Catalogue, own_inputs
from sandhi_core.grouping.besides import NO_VOCABULARY, STORED_TWICE, Besides, besides
from sandhi_core.grouping.form import DUPLICATE, NO_KIN, NO_PARTNER, OTHER_TOKENS
from sandhi_core.grouping.groups import make_groups, make_plan
from sandhi_core.grouping.methods import Measures
from sandhi_core.pools.pool import GroupingSettings, MergingSettings, ModelEntry, Pool, TaskBudget
from sandhi_core.records import Fingerprint, Group, Groups, Recipe, Slot
from sandhi_core.rungs.allotment import Candidate
from sandhi_core.rungs.choice import Evidence
from tests.models import (
    BUILDERS,
    CHARACTERS,
    WEIGHTS,
    edit_json,
    edit_tensors,
    tiny_gemma,
    tiny_gemma2,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
    write_tokenizer,
)
from tests.synthetic import profile

BOTH = ("norms", "embeddings")
RESCALED = MergingSettings(rescale="common")
EMBEDDING, HEAD, NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
FIRST, SECOND = "input_layernorm.weight", "post_attention_layernorm.weight"
Builder = Callable[..., Path]


class Models:
    """Tiny checkpoints by name, with their fingerprints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, builder: Builder = tiny_llama, seed: int | None = None, **config: Any) -> Path:
        return builder(self.folder / name, sum(map(ord, name)) if seed is None else seed, **config)

    def fingerprint(self, name: str) -> Fingerprint:
        return fingerprint(self.opened(name), self.folder / "scans")

    def opened(self, name: str) -> Checkpoint:
        return Checkpoint.open(self.folder / name, name)

    def besides(self, name: str, kinds: tuple[str, ...] = BOTH) -> Besides:
        return besides(self.opened(name), self.fingerprint(name), kinds)

    def keys(self, name: str) -> dict[tuple[int, str], str]:
        return {(s.layer, s.projection): s.key for s in self.besides(name).slots}

    def groups(
        self,
        names: str,
        earlier: Groups | None = None,
        families: Mapping[str, str] | None = None,
        kinds: tuple[str, ...] = BOTH,
        merging: MergingSettings = RESCALED,
        measures: Measures | None = None,
    ) -> Groups:
        return make_groups(
            "pool",
            "pool.g",
            {n: self.fingerprint(n) for n in names},
            {n: profile(n, 2) for n in names},
            GroupingSettings(),
            merging,
            0.05,
            earlier,
            families,
            {n: self.besides(n, kinds) for n in names},
            measures,
        )


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


def table(groups: Groups, projection: str = EMBEDDING) -> list[Group]:
    return [g for g in groups.groups if g.recipe.projection == projection]


def reasons(groups: Groups, projection: str = EMBEDDING) -> dict[str, str]:
    return {e.model: e.reason for e in groups.excluded if e.projection == projection}


# --- which tensors, and what they mean ----------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", sorted(BUILDERS))
def test_every_vector_and_table_of_every_architecture_is_one(models: Models, model_type: str, tied: bool) -> None:
    path = models.add("m", BUILDERS[model_type], tie_word_embeddings=tied)
    with safe_open(path / WEIGHTS, "pt") as file:
        shapes = {name: file.get_tensor(name).shape for name in file.keys()}  # noqa: SIM118 - no dict
    vectors = {name for name, shape in shapes.items() if len(shape) == 1}
    tables = {name for name, shape in shapes.items() if shape[0] == 64 and name.endswith((EMBEDDING, HEAD))}
    assert len(tables) == (1 if tied else 2)
    assert {s.tensor for s in models.besides("m", ("norms",)).slots} == vectors
    assert {s.tensor for s in models.besides("m", ("embeddings",)).slots} == tables
    assert models.besides("m", ()) == Besides()
    found = models.besides("m").slots
    assert {s.tensor for s in found} == vectors | tables
    assert len({(s.layer, s.projection) for s in found}) == len(found)


Two = tuple[Builder, dict[str, Any], Builder, dict[str, Any]]
AGREE: dict[str, Two] = {
    "norms of llama and mistral": (tiny_llama, {}, tiny_mistral, {}),
    "another rope changes no norm": (tiny_llama, {}, tiny_llama, {"rope_theta": 1e6}),
    "another window changes no embedding": (tiny_mistral, {}, tiny_mistral, {"sliding_window": 32}),
}


@pytest.mark.parametrize("two", AGREE.values(), ids=AGREE)
def test_what_means_the_same_agrees(models: Models, two: Two) -> None:
    models.add("a", two[0], **two[1])
    models.add("b", two[2], **two[3])
    assert models.keys("a") == models.keys("b")


DIFFER: dict[str, tuple[Builder, dict[str, Any], Builder, dict[str, Any], set[str]]] = {
    "w and 1 + w": (
        tiny_llama, {"tie_word_embeddings": True}, tiny_gemma, {}, {FIRST, NORM, SECOND, EMBEDDING},
    ),
    "one norm after another part": (tiny_gemma, {}, tiny_gemma2, {}, {FIRST, NORM, SECOND}),
    "eps": (tiny_llama, {}, tiny_llama, {"rms_norm_eps": 1e-3}, {FIRST, NORM, SECOND}),
    "width": (tiny_llama, {}, tiny_llama, {"hidden_size": 64}, {FIRST, NORM, EMBEDDING, HEAD}),
    "padded rows": (tiny_llama, {}, tiny_llama, {"vocab_size": 80}, {EMBEDDING, HEAD}),
    "tied and untied": (tiny_llama, {}, tiny_llama, {"tie_word_embeddings": True}, {EMBEDDING}),
    "capped logits": (tiny_gemma2, {}, tiny_gemma2, {"final_logit_softcapping": 9.0}, {EMBEDDING}),
    "biases of turned rows": (
        tiny_qwen2, {}, tiny_qwen2, {"rope_theta": 1e6}, {f"self_attn.{p}_proj.bias" for p in "qkv"},
    ),
    "heads of norms": (
        tiny_qwen3, {}, tiny_qwen3, {"num_attention_heads": 8}, {"self_attn.q_norm.weight", "self_attn.k_norm.weight"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFER.values(), ids=DIFFER)
def test_what_means_something_else_differs(models: Models, case: tuple[Any, ...]) -> None:
    first, config, second, other, differing = case
    models.add("a", first, **config)
    models.add("b", second, **other)
    one, two = models.keys("a"), models.keys("b")
    common = one.keys() & two.keys()
    assert differing <= {name for at in common if one[at] != two[at] for name in [at[1]]}
    if first is second:
        same = {name for at in common if one[at] == two[at] for name in [at[1]]}
        assert not same & differing


# --- vocabularies -------------------------------------------------------------------------------------------


def test_tables_of_one_vocabulary_are_grouped_and_averaged_as_they_are(models: Models) -> None:
    for name in "ab":
        models.add(name)
    edit_json(models.folder / "b" / "tokenizer.json", padding=None, truncation=None)  # other bytes, the same tokens
    (models.folder / "b" / "tokenizer.json").write_text((models.folder / "b" / "tokenizer.json").read_text() + "\n")
    a, b = (models.fingerprint(n).files["tokenizer.json"] for n in "ab")
    assert a != b
    found = models.groups("ab")
    for projection in (EMBEDDING, HEAD, NORM, FIRST):
        for group in table(found, projection):
            assert [m.model for m in group.members] == ["a", "b"]
            assert (group.recipe.method, group.recipe.rescale) == ("mean", "none")
    assert [len(table(found, p)) for p in (EMBEDDING, HEAD, NORM, FIRST)] == [1, 1, 1, 2]
    assert {g.recipe.rescale for g in table(found, "up")} == {"common"}


@pytest.mark.parametrize("reform", [False, True])
@pytest.mark.parametrize("named", [("member",), ("regmean",), ("base", "member"), ("regmean", "mean")])
def test_they_are_averaged_as_they_are_and_not_measured_whatever_the_methods(
    models: Models, named: tuple[str, ...], reform: bool
) -> None:
    for name in "abcd":
        models.add(name)
    merging = MergingSettings.model_validate({"methods": named, "reform": reform})

    def distance(one: Slot, other: Slot) -> float:
        assert one.projection in ORDER
        return 1.0

    def candidate(slot: Slot, recipe: Recipe) -> Candidate:
        assert slot.projection in ORDER
        cost = 9.0 if slot.model == "a" else 1e-3
        return Candidate(np.array([cost]), recipe.shape, float(slot.nbytes), 0)

    measures = Measures({"base": models.fingerprint("a")}, distance, lambda model: model, Evidence(candidate))
    record = models.groups("abc", merging=merging, measures=measures)
    projections, others = [], []
    for group in record.groups:
        (projections if group.recipe.projection in ORDER else others).append(group)
    assert {g.recipe.method for g in projections} <= set(named) and len(others) == 2 * 2 + 3
    for group in others:
        assert (group.recipe.method, group.recipe.rescale, group.compared) == ("mean", "none", {})
        assert [c.model for c in group.recipe.contributors] == list("abc")
        assert not any(c.inputs for c in group.recipe.contributors)
    again = models.groups("abcd", earlier=record, merging=merging, measures=measures)
    assert [g.recipe for g in again.groups] == [g.recipe for g in record.groups]
    assert all([m.model for m in g.members] == list("abcd") for g in again.groups)


def test_padded_rows_are_rows_like_others(models: Models) -> None:
    for name in "ab":
        models.add(name, vocab_size=80)
    assert len(table(models.groups("ab"))) == 1


def other_order(directory: Path) -> None:
    write_tokenizer(directory, CHARACTERS[1] + CHARACTERS[0] + CHARACTERS[2:])


def one_token(directory: Path) -> None:
    write_tokenizer(directory, CHARACTERS[:-1] + "~")


def added_token(directory: Path) -> None:
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text())
    data["added_tokens"].append(data["added_tokens"][0] | {"id": 64, "content": "<call>"})
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("change", [other_order, one_token, added_token])
def test_other_tokens_keep_tables_apart_and_nothing_else(models: Models, change: Callable[[Path], None]) -> None:
    for name in "abc":
        models.add(name, vocab_size=80)
    change(models.folder / "c")
    found = models.groups("abc")
    assert reasons(found) == reasons(found, HEAD) == {"c": OTHER_TOKENS}
    assert [[m.model for m in g.members] for g in table(found)] == [["a", "b"]]
    assert [[m.model for m in g.members] for g in table(found, NORM)] == [["a", "b", "c"]]


def test_families_are_kept_apart_before_vocabularies_are(models: Models) -> None:
    for name in "abc":
        models.add(name)
    one_token(models.folder / "c")
    found = models.groups("abc", families={"a": "a", "b": "a", "c": "c"})
    assert reasons(found) == reasons(found, NORM) == {"c": NO_KIN}


def test_tied_and_untied_tables_have_no_partner(models: Models) -> None:
    models.add("a")
    models.add("b", tie_word_embeddings=True)
    found = models.groups("ab")
    assert reasons(found) == {"a": NO_PARTNER, "b": NO_PARTNER}
    assert reasons(found, HEAD) == {"a": NO_PARTNER}


def test_a_tied_table_that_is_stored_twice_is_left_out_until_it_is_saved_again(models: Models) -> None:
    for name in "abc":
        models.add(name, tie_word_embeddings=True)
    before = (models.folder / "c" / WEIGHTS).read_bytes()
    edit_tensors(models.folder / "c", lambda t: t.update({HEAD: t[f"model.{EMBEDDING}"]}))
    found = models.groups("abc")
    assert reasons(found) == {"c": STORED_TWICE} and reasons(found, HEAD) == {}
    assert [[m.model for m in g.members] for g in table(found)] == [["a", "b"]]
    (models.folder / "c" / WEIGHTS).write_bytes(before)
    again = models.groups("abc", found)
    assert [[m.model for m in g.members] for g in table(again)] == [["a", "b", "c"]]
    assert table(again)[0].recipe == table(found)[0].recipe
    assert reasons(again) == {}


def test_a_tokenizer_that_cannot_be_made_leaves_the_tables_out(models: Models) -> None:
    for name in "ab":
        models.add(name)
    (models.folder / "b" / "tokenizer.json").write_text("{}")
    assert reasons(models.groups("ab")) == {"a": NO_PARTNER, "b": NO_VOCABULARY}


def test_equal_tables_need_no_recipe(models: Models) -> None:
    for name in "ab":
        models.add(name, seed=1)
    assert reasons(models.groups("ab")) == {"a": DUPLICATE, "b": DUPLICATE}


# --- pools that change --------------------------------------------------------------------------------------


def test_a_pool_that_asks_later_keeps_its_recipes_and_gets_the_others(models: Models) -> None:
    for name in "abc":
        models.add(name)
    before = models.groups("ab", kinds=())
    assert {g.members[0].component for g in before.groups} == {"attn", "mlp"}
    asked = models.groups("ab", before)
    old = {g.digest for g in before.groups}
    assert old < {g.digest for g in asked.groups}
    assert {g.digest for g in asked.groups} == {g.digest for g in models.groups("ab").groups}
    assert not asked.excluded
    joined = models.groups("abc", asked)
    assert [g.recipe for g in joined.groups] == [g.recipe for g in asked.groups]
    assert all([m.model for m in g.members] == ["a", "b", "c"] for g in joined.groups)
    no_more = models.groups("ab", asked, kinds=())
    assert no_more == before


def test_a_model_with_other_tokens_does_not_join(models: Models) -> None:
    for name in "abc":
        models.add(name)
    one_token(models.folder / "c")
    joined = models.groups("abc", models.groups("ab"))
    assert reasons(joined) == reasons(joined, HEAD) == {"c": OTHER_TOKENS}
    assert [m.model for m in table(joined, NORM)[0].members] == ["a", "b", "c"]


def test_a_tokenizer_that_changes_takes_its_table_out(models: Models) -> None:
    for name in "abc":
        models.add(name)
    earlier = models.groups("abc")
    one_token(models.folder / "c")
    later = models.groups("abc", earlier)
    assert [[m.model for m in g.members] for g in table(later)] == [["a", "b"]]
    assert [c.model for c in table(later)[0].recipe.contributors] == ["a", "b"]
    assert set(reasons(later)) == {"c"}


def test_a_plan_offers_each_of_them_once_after_the_projections_of_its_layer(models: Models) -> None:
    for name in "ab":
        models.add(name)
    found, own = models.groups("ab"), models.fingerprint("a")
    plan = make_plan(found, own, profile("a", 2), "pool")
    merges = [merge.tensor for step in plan.steps for merge in step.merges]
    assert sorted(merges) == sorted(t.name for t in own.tensors)
    places = {(step.component, step.layer) for step in plan.steps}
    assert places == {(c, n) for c in ("attn", "mlp", "norms") for n in (0, 1)} | {("norms", -1), ("embeddings", -1)}


def test_a_pool_of_projections_has_the_inputs_that_it_had(tmp_path: Path) -> None:
    task = (TaskBudget(task="t", metric="acc", budget=0.1),)

    def own(stage: str, key: str, **grouping: Any) -> Any:
        settings = GroupingSettings(**grouping)
        pool = Pool(name="p", models=(ModelEntry(name="a", path="/a", tasks=task),), grouping=settings)
        return own_inputs(Catalogue({"p": pool}, {"a": "g"}), (stage, key), lambda *_: {}, lambda *_: {})["grouping"]

    plain = {"candidates": "wide", "on_new_model": "join", "on_removed_model": "reform"}
    for node in (("groups", "p.g"), ("plan", "p.a")):
        assert own(*node) == plain
        assert own(*node, besides=["norms"]) == plain | {"besides": ["norms"]}
