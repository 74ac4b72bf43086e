"""Packed, layer-cached scoring gives lm-eval's numbers; cached and uncached runs give the same bits."""

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from sandhi_core.evaluation.layers import LayerCache, States
from sandhi_core.evaluation.packed import PackedLM
from tests.evaluation.local_tasks import choice_task
from tests.evaluation.test_drafts import LONGROPE
from tests.models import tiny

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 12},
    "qwen2": {},
    "qwen2-windows": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    "qwen3": {},
    "gemma2": {"sliding_window": 12},
    "gemma3_text": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "phi3": {},
    "phi3-scaled": LONGROPE,
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 12,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
}
Load = Callable[[str], tuple[Any, Any]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loaded(shape: str) -> tuple[Any, Any]:
        """A tiny model of four layers in fp32, and its tokenizer."""
        path = tiny(
            shape.partition("-")[0], tmp_path / shape, dtype=torch.float32, num_hidden_layers=4, **SHAPES.get(shape, {})
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return model, transformers.AutoTokenizer.from_pretrained(path)

    return loaded


def asked(kind: str = "loglikelihood", questions: int = 12) -> list[Instance]:
    chance = random.Random(kind)

    def text(least: int, most: int) -> str:
        return "".join(chance.choices("abcdefghij klm", k=chance.randint(least, most))) + "m"

    if kind == "loglikelihood_rolling":
        return [Instance(kind, {}, (text(3, 120),), i) for i in range(questions)]
    shared = "what all of them begin with. "
    contexts = ["", *(shared + text(1, 40) for _ in range(questions - 1))]
    return [Instance(kind, {}, (c, " " + text(1, 9)), i) for c in contexts for i in range(4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_answers_are_those_of_lm_eval(load: Load, shape: str, kind: str) -> None:
    model, tokenizer = load(shape)
    requests = asked(kind)
    with torch.no_grad():
        own = getattr(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1), kind)(requests, disable_tqdm=True)
    packed = PackedLM(model, tokenizer)
    found = getattr(packed, kind)(requests, disable_tqdm=True)
    assert packed.plain is None
    for theirs, mine in zip(own, found, strict=True):
        if kind == "loglikelihood":
            assert mine[1] == theirs[1]
            mine, theirs = mine[0], theirs[0]
        assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(("shape", "cache"), [*((s, 1 << 30) for s in SHAPES), ("llama", 0), ("llama", 100_000)])
def test_cached_runs_give_the_bits_of_uncached_ones(load: Load, shape: str, cache: int) -> None:
    """A walk of random changes, some of them kept, each scored from the lowest layer that changed."""
    model, tokenizer = load(shape)
    cached, fresh = PackedLM(model, tokenizer, 64, {"cpu": cache}), PackedLM(model, tokenizer, 64, {})
    fresh._layered = cached._layered  # one set of hooks on the model
    chance = random.Random(shape)
    names = [n for n, p in model.named_parameters() if "layers." in n and p.ndim == 2]
    kept: dict[str, str] = {}
    requests = asked(questions=5)
    cached.loglikelihood(requests, disable_tqdm=True)
    for step in range(12):
        name = chance.choice(names)
        parameter, before = model.get_parameter(name), model.get_parameter(name).detach().clone()
        with torch.no_grad():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        cached.weights = {**kept, name: str(step)}
        fresh.weights = {name: f"fresh {step}"}
        assert cached.loglikelihood(requests, disable_tqdm=True) == fresh.loglikelihood(requests, disable_tqdm=True)
        if chance.random() < 0.5:
            kept[name] = str(step)
        else:
            with torch.no_grad():
                parameter.copy_(before)


def test_layers_that_need_more_than_hidden_states_are_never_skipped(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    """Its last two layers take keys and values from those below."""
    model, tokenizer = load("gemma3n_text")
    packed = PackedLM(model, tokenizer)
    with caplog.at_level(logging.WARNING):
        before = packed.loglikelihood(asked(), disable_tqdm=True)
    assert packed.plain is None and "scored without the layer cache" in caplog.text
    packed.weights = {"model.layers.3.mlp.up_proj.weight": "the same"}
    assert packed.loglikelihood(asked(), disable_tqdm=True) == before


def test_a_model_is_checked_again_until_weights_gave_numbers_and_where_requests_are_longer(load: Load) -> None:
    model, tokenizer = load("llama")
    packed = PackedLM(model, tokenizer)
    parameter = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter.fill_(float("nan"))
    packed.loglikelihood(asked(questions=3), disable_tqdm=True)
    assert packed._checked == 0
    with torch.no_grad():
        parameter.copy_(before)
    packed.loglikelihood(asked(questions=3), disable_tqdm=True)
    first = packed._checked
    packed.loglikelihood([Instance("loglikelihood", {}, ("a" * 2 * first, " b"), 0)], disable_tqdm=True)
    assert 0 < first < packed._checked and packed.plain is None


@pytest.fixture
def layers_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Which layers computed anything, in order."""
    ran: list[int] = []
    original = transformers.models.llama.modeling_llama.LlamaAttention.forward

    def counting(self: Any, *arguments: Any, **named: Any) -> Any:
        ran.append(self.layer_idx)
        return original(self, *arguments, **named)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaAttention, "forward", counting)
    yield ran


def test_only_layers_from_the_change_on_are_computed(load: Load, layers_run: list[int]) -> None:
    model, tokenizer = load("llama")
    scorer = PackedLM(model, tokenizer, 4096)
    requests = asked(questions=3)

    def computed(*changed: str) -> list[int]:
        scorer.weights = {name: name for name in changed}
        layers_run.clear()
        scorer.loglikelihood(requests, disable_tqdm=True)
        return layers_run.copy()

    attention, mlp = "model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.mlp.up_proj.weight"
    computed()
    assert computed(attention.format(2)) == [2, 3]
    assert computed(mlp.format(2)) == [3]  # its attention is known
    assert computed(attention.format(1)) == [1, 2, 3]  # the trial before was rejected
    assert computed(attention.format(1), mlp.format(3)) == []  # accepted: what it gave is kept
    assert computed(attention.format(1)) == [3]
    assert computed("model.embed_tokens.weight") == [0, 1, 2, 3]


def test_weights_that_change_without_a_word_are_noticed(load: Load) -> None:
    model, tokenizer = load("llama")
    scorer, requests = PackedLM(model, tokenizer, 4096), asked(questions=3)

    def scored() -> list[float]:
        return [value for value, _ in scorer.loglikelihood(requests, disable_tqdm=True)]

    def expected() -> Any:
        plainly = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1).loglikelihood(requests, disable_tqdm=True)
        return pytest.approx([value for value, _ in plainly], abs=1e-4)

    before, projection = scored(), model.model.layers[1].mlp.down_proj
    with torch.no_grad():
        projection.weight.mul_(-8.0)
    assert expected() != before
    assert scored() == expected()
    projection.weight = torch.nn.Parameter(projection.weight.detach() * 2.0)
    assert scored() == expected()


def test_every_kind_of_request_has_its_states(load: Load, layers_run: list[int]) -> None:
    """Several settings of generation and more windows than a batch are several sets; all start at the change."""
    model, tokenizer = load("llama")
    scorer = PackedLM(model, tokenizer, 200)
    outputs = [
        Instance("generate_until", {}, (f"{n} what", {"until": [], "max_gen_toks": room, "do_sample": False}), n)
        for room in (3, 4)
        for n in range(3)
    ]
    requests = {"loglikelihood": asked(questions=3), "loglikelihood_rolling": asked("loglikelihood_rolling", 9)}
    requests["generate_until"] = outputs
    scorer.answer(requests, {})
    assert len(scorer.sets.kept) > 4
    for layer in (3, 2):
        layers_run.clear()
        scorer.answer(requests, {f"model.layers.{layer}.self_attn.q_proj.weight": "named alone: nothing changed"})
        assert set(layers_run) == set(range(layer, 4))
    layers_run.clear()
    scorer.answer({"loglikelihood": asked(questions=4)}, {})
    assert 0 in layers_run and len(scorer.sets.kept) == 1  # other questions: what was kept of the old is dropped


def test_a_trial_after_a_restart_still_teaches_what_lies_below_it(load: Load, layers_run: list[int]) -> None:
    """The original's score may come from the log, so that its states were never computed."""
    model, tokenizer = load("llama")
    scorer = PackedLM(model, tokenizer, 4096)
    requests = asked(questions=3)
    for layer, expected in ((3, 4), (2, 2), (1, 3)):
        scorer.weights = {f"model.layers.{layer}.self_attn.q_proj.weight": "noise"}
        layers_run.clear()
        scorer._checked = 10**6
        scorer.loglikelihood(requests, disable_tqdm=True)
        assert len(layers_run) == expected


def test_a_pass_that_is_cut_short_leaves_nothing_behind(load: Load) -> None:
    model, tokenizer = load("llama")
    scorer = PackedLM(model, tokenizer, 40)
    requests = asked(questions=5)
    whole = scorer.loglikelihood(requests, disable_tqdm=True)
    (state,) = scorer.sets.kept.values()
    assert len(state.packs) > 1
    scorer.weights = {"model.layers.1.mlp.up_proj.weight": "new"}
    sweep = scorer._layered.swept(state.packs, state.cache, scorer.weights)
    next(sweep)
    sweep.close()
    assert state.cache.trial is None
    scorer.weights = {}
    assert scorer.loglikelihood(requests, disable_tqdm=True) == whole


def test_states_of_no_layer_are_kept_where_none_fits() -> None:
    cache = LayerCache(range(0))
    assert cache.kept.start({"model.layers.3.mlp.up_proj.weight": "x"}) == (0, False)
    assert States().start({}) == (0, False)


@pytest.mark.parametrize("wrong", ["mask", "other layers"])
def test_what_cannot_be_packed_is_scored_plainly_and_the_log_says_so(
    load: Load, wrong: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load("gpt_neox" if wrong == "other layers" else "llama")
    with torch.no_grad():
        own = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=5).loglikelihood(asked(), disable_tqdm=True)
    if wrong == "mask":
        original = model.model.forward
        # Ignores the tree mask, as an architecture with masks of its own may.
        monkeypatch.setattr(model.model, "forward", lambda *a, **k: original(*a, **{**k, "attention_mask": None}))
    with caplog.at_level(logging.WARNING):
        scorer = PackedLM(model, tokenizer)
        found = scorer.loglikelihood(asked(), disable_tqdm=True)
    assert "scored plainly" in caplog.text and scorer.plain is not None
    assert [f[0] for f in found] == pytest.approx([o[0] for o in own], abs=1e-4)


def test_a_model_that_only_generates_is_held_to_lm_eval_too(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load("llama")
    original = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *a, **k: original(*a, **{**k, "attention_mask": None}))
    texts = [f"what comes after {letter} and so on" for letter in "abcdefgh"]  # of one length: nothing is padded
    requests = [Instance("generate_until", {}, (t, {"until": [], "max_gen_toks": 4}), i) for i, t in enumerate(texts)]
    own = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1).generate_until(requests, disable_tqdm=True)
    scorer = PackedLM(model, tokenizer)
    assert scorer.generate_until(requests, disable_tqdm=True) == own
    assert scorer.plain is not None


@pytest.mark.parametrize("arguments", [{}, {"num_fewshot": 3}, {"apply_chat_template": True}])
def test_simple_evaluate_takes_it_as_a_model(
    load: Load, tmp_path: Path, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load("qwen3")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    monkeypatch.chdir(choice_task(tmp_path / "tasks", fewshot_split="test"))
    results = []
    for scorer in (HFLM(pretrained=model, tokenizer=tokenizer), PackedLM(model, tokenizer)):
        manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
        got = lm_eval.simple_evaluate(scorer, tasks=["letters"], task_manager=manager, bootstrap_iters=0, **arguments)
        samples = [(s["doc_id"], s["acc"], s["acc_norm"]) for s in got["samples"]["letters"]]
        results.append((got["results"]["letters"]["acc,none"], sorted(samples)))
    assert results[0] == results[1]


def test_other_thread_counts_and_tree_sizes_move_noise_only(load: Load) -> None:
    model, tokenizer = load("llama")
    requests, found = asked(), []
    threads = torch.get_num_threads()
    try:
        for count, tokens in ((1, 4096), (2, 4096), (1, 48)):
            torch.set_num_threads(count)
            scorer = PackedLM(model, tokenizer, tokens, {})
            found.append([answer[0] for answer in scorer.loglikelihood(requests, disable_tqdm=True)])
    finally:
        torch.set_num_threads(threads)
    assert found[1] == pytest.approx(found[0], abs=1e-4) and found[2] == pytest.approx(found[0], abs=1e-4)
