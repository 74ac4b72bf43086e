"""Outputs from drafts are token for token those of decoding from scratch, whatever changed."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["llama", "gemma3_text"])
def test_outputs_are_those_of_decoding_from_scratch(tmp_path: Path, shape: str, kind: str) -> None:
    window = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    model, own, packed = both(tmp_path, shape, 64, **(window if shape == "gemma3_text" else {}))
    asked = requests(kind)
    fresh = True
    for step, size in enumerate((0.0, 0.02, 0.1, 0.5)):
        name = "model.layers.1.mlp.up_proj.weight"
        parameter, before = model.get_parameter(name), model.get_parameter(name).detach().clone()
        with torch.no_grad():
            parameter += size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        packed.weights = {name: str(step)} if size else {}
        packed.drafts.decoded = 0
        found = packed.generate_until(asked, disable_tqdm=True)
        assert found == own.generate_until(asked, disable_tqdm=True)
        assert packed.drafts.decoded == len(asked) if fresh else packed.drafts.decoded <= len(asked)
        fresh = False
        with torch.no_grad():
            parameter.copy_(before)
    packed.weights, packed.drafts.decoded = {}, 0
    packed.generate_until(asked, disable_tqdm=True)
    assert packed.drafts.decoded == 0  # the original's outputs stand, nothing is decoded


def test_settings_that_move_the_choice_are_decoded_every_time(tmp_path: Path) -> None:
    model, own, packed = both(tmp_path, "llama", 64)
    model.generation_config.repetition_penalty = 3.0
    asked = requests("stop text")
    expected = own.generate_until(asked, disable_tqdm=True)
    assert packed.generate_until(asked, disable_tqdm=True) == expected
    packed.drafts.decoded = 0
    assert packed.generate_until(asked, disable_tqdm=True) == expected
    assert packed.drafts.decoded > 0


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
