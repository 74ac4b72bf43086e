"""Outputs from drafts are token for token those of decoding from scratch, whatever changed."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from sandhi_core.evaluation.drafts import UNSETTLED, Drafts, Tokens
from sandhi_core.evaluation.packed import PackedLM
from tests.models import tiny

KINDS: dict[str, dict[str, Any]] = {
    "stop text": {"until": ["ab", "\n"], "max_gen_toks": 12},
    "end of text only": {"until": [], "max_gen_toks": 9, "do_sample": False},
    "one token": {"until": ["z"], "max_gen_toks": 1, "temperature": 0.0},
}


def requests(kind: str, questions: int = 14) -> list[Instance]:
    chance = random.Random(kind)
    texts = ("say " + "".join(chance.choices("abcdef", k=chance.randint(1, 30))) for _ in range(questions))
    return [Instance("generate_until", {}, (text, dict(KINDS[kind])), i) for i, text in enumerate(texts)]


def both(tmp_path: Path, shape: str, batch_tokens: int, **config: Any) -> tuple[Any, HFLM, PackedLM]:
    path = tiny(shape, tmp_path / shape, dtype=torch.float32, num_hidden_layers=3, **config)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    own = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    return model, own, PackedLM(model, tokenizer, batch_tokens)


def followed(drafts: Drafts, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[Tokens, Tokens], dict[Tokens, Tokens]]:
    """By context: the outputs that `drafts` gives, and of those that it decodes what it has before."""
    outputs, decoded = drafts.outputs, drafts._decoded
    given: dict[Tokens, Tokens] = {}
    begun: dict[Tokens, Tokens] = {}

    def giving(contexts: list[Tokens], *others: Any) -> list[Tokens]:
        given.update(zip(contexts, found := outputs(contexts, *others), strict=True))
        return found

    def decoding(contexts: list[Tokens], starts: dict[int, Tokens], *others: Any, **named: Any) -> dict[int, Tokens]:
        begun.update({contexts[at]: start for at, start in starts.items()})
        return decoded(contexts, starts, *others, **named)

    monkeypatch.setattr(drafts, "outputs", giving)
    monkeypatch.setattr(drafts, "_decoded", decoding)
    return given, begun


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["llama", "gemma3_text"])
def test_outputs_are_those_of_decoding_from_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, kind: str
) -> None:
    """Only outputs that differ from their draft are decoded; if drafts are formed again without end, only those that
    are longer than their draft, from where it ends."""
    window = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    model, own, packed = both(tmp_path, shape, 64, **(window if shape == "gemma3_text" else {}))
    asked = requests(kind)
    given, begun = followed(packed.drafts, monkeypatch)
    for step, (size, unsettled) in enumerate(product((0.0, 0.02, 0.1, 0.5), (UNSETTLED, 1.0))):
        name = "model.layers.1.mlp.up_proj.weight"
        parameter, before = model.get_parameter(name), model.get_parameter(name).detach().clone()
        with torch.no_grad():
            parameter += size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step // 2))
        packed.weights = {name: str(size)} if size else {}
        monkeypatch.setattr("sandhi_core.evaluation.drafts.UNSETTLED", unsettled)
        drafts = {context: draft for (context, _), draft in packed.drafts._drafts.items()}
        begun.clear()
        packed.drafts.decoded = 0
        assert packed.generate_until(asked, disable_tqdm=True) == own.generate_until(asked, disable_tqdm=True)
        assert len(drafts) == (len(asked) if step else 0) and packed.drafts.decoded == len(begun)
        changed = {context for context, out in given.items() if out != drafts.get(context)}
        had = {context: out[: len(drafts.get(context, ()))] for context, out in given.items()}
        longer = {context: start for context, start in had.items() if start != given[context]}
        if unsettled == 1:
            assert begun == longer
        else:
            assert longer.keys() <= begun.keys() <= changed
            assert all(given[context][: len(start)] == start for context, start in begun.items())
        with torch.no_grad():
            parameter.copy_(before)
    begun.clear()
    packed.weights = {}
    packed.generate_until(asked, disable_tqdm=True)
    assert not begun  # the original's outputs stand, nothing is decoded


def test_settings_that_move_the_choice_are_decoded_every_time(tmp_path: Path) -> None:
    model, own, packed = both(tmp_path, "llama", 64)
    model.generation_config.repetition_penalty = 3.0
    asked = requests("stop text")
    expected = own.generate_until(asked, disable_tqdm=True)
    assert packed.generate_until(asked, disable_tqdm=True) == expected
    packed.drafts.decoded = 0
    assert packed.generate_until(asked, disable_tqdm=True) == expected
    assert packed.drafts.decoded == len(asked)


def test_several_settings_in_one_call_and_equal_contexts(tmp_path: Path) -> None:
    _, own, packed = both(tmp_path, "llama", 4096)
    asked = [*requests("stop text", 4), *requests("one token", 4), *requests("stop text", 4)]
    for _ in range(2):
        assert packed.generate_until(asked, disable_tqdm=True) == own.generate_until(asked, disable_tqdm=True)


def test_a_word_that_changed_in_a_draft_is_found_without_decoding(tmp_path: Path) -> None:
    _, _, packed = both(tmp_path, "llama", 4096)
    asked = requests("end of text only", 6)
    expected = packed.generate_until(asked, disable_tqdm=True)
    drafts = packed.drafts._drafts
    for number, (key, draft) in enumerate(list(drafts.items())):
        assert draft is not None and len(draft) == 9
        drafts[key] = (*draft[:number], draft[number] + 1, *draft[number + 1 :])  # as if other weights had given it
    packed.drafts.decoded = 0
    assert packed.generate_until(asked, disable_tqdm=True) == expected
    assert packed.drafts.decoded == 0


MOVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a slight penalty": ({"repetition_penalty": 1.05}, {}),
    "no repetition": ({}, {"no_repeat_ngram_size": 4}),
    "a least length": ({"min_new_tokens": 6, "eos_token_id": [2, 5, 8, 9, 10, 11]}, {}),
    "suppressed tokens": ({"suppress_tokens": [4, 5, 6, 7, 8, 9]}, {}),
    "beams of the checkpoint": ({"num_beams": 2}, {}),
    "beams of the task": ({}, {"num_beams": 2}),
    "a length of the checkpoint": ({"max_new_tokens": 9}, {}),
}


def walk(model: Any, own: HFLM, packed: PackedLM, asked: list[Instance], steps: int) -> None:
    """Random changes anywhere, after the first outputs: never another text than lm-eval's own, one prompt at a time."""
    chance = random.Random(steps)
    for step in range(steps):
        name = chance.choice([name for name, _ in model.named_parameters()])
        parameter = model.get_parameter(name)
        before, size = parameter.detach().clone(), chance.choice([0.02, 0.05, 0.2]) if step else 0.0
        with torch.no_grad():
            parameter += size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        packed.weights = {name: str(step)} if step else {}
        assert packed.generate_until(asked, disable_tqdm=True) == own.generate_until(asked, disable_tqdm=True)
        with torch.no_grad():
            parameter.copy_(before)


@pytest.mark.parametrize("kind", MOVED)
def test_what_moves_the_choice_counts_under_changed_weights_too(tmp_path: Path, kind: str) -> None:
    """The first weights may agree with the likeliest tokens where later ones do not."""
    of_checkpoint, of_task = MOVED[kind]
    model, own, packed = both(tmp_path, "llama", 256)
    for name, value in of_checkpoint.items():
        setattr(model.generation_config, name, value)
    asked = [Instance("generate_until", {}, (r.args[0], r.args[1] | of_task), r.idx) for r in requests("stop text")]
    if "beams" in kind:  # lm-eval's own code, whose beams go on until all of a batch have ended
        own.batch_size_per_gpu = packed.batch_size_per_gpu
    walk(model, own, packed, asked, 10)


LONGROPE = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0, 4.0, 5.0, 6.0],
        "original_max_position_embeddings": 32,
        "factor": 8.0,
    },
}


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ("phi3", LONGROPE),  # every position moves where a sequence grows beyond 32
        ("opt", {"max_position_embeddings": 40, "word_embed_proj_dim": 32, "ffn_dim": 48}),  # no positions beyond 40
    ],
)
def test_no_output_is_moved_by_one_that_is_longer(tmp_path: Path, shape: str, config: dict[str, Any]) -> None:
    model, own, packed = both(tmp_path, shape, 256, **config)
    asked = requests("stop text", 24)
    walk(model, own, packed, asked, 6)
    assert packed.plain is None and packed.drafts._drafts


def test_a_changed_token_can_undo_the_end_of_a_draft_and_make_another(tmp_path: Path) -> None:
    _, own, packed = both(tmp_path, "llama", 4096)
    context = tuple(own.tok_encode("say abc"))
    whole = packed.drafts.outputs([context], 9, [], {"do_sample": False})[0]
    wrong = next(token for token in range(3, 60) if token not in whole)

    def outputs(stop: str, draft: tuple[int, ...]) -> tuple[int, ...]:
        drafts = packed.drafts
        drafts._drafts = dict.fromkeys([(context, repr((9, [stop], [("do_sample", False)])))], draft)
        return drafts.outputs([context], 9, [stop], {"do_sample": False})[0]

    undone = own.tok_decode([wrong, whole[5]])
    assert outputs(undone, (*whole[:4], wrong, whole[5])) == whole
    made = own.tok_decode(whole[4:6])
    (expected,) = Drafts(packed.model, packed.tokenizer, packed._chosen, 99).outputs(
        [context], 9, [made], {"do_sample": False}
    )
    assert outputs(made, (*whole[:4], wrong, *whole[5:])) == expected and len(expected) < 9


def test_a_model_that_cannot_be_packed_generates_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own, packed = both(tmp_path, "llama", 4096)
    forward = model.model.forward

    def picky(*arguments: Any, **named: Any) -> Any:
        if named["attention_mask"] is not None and named["attention_mask"].ndim == 4:
            raise KeyError("a mask of its own")
        return forward(*arguments, **named)

    asked = requests("stop text", 4)
    expected = own.generate_until(asked, disable_tqdm=True)
    monkeypatch.setattr(model.model, "forward", picky)
    assert packed.generate_until(asked, disable_tqdm=True) == expected
    assert packed.plain is not None and "a mask of its own" in packed.plain
