"""The quick look at an export: prompts are continued, and a directory that is none is told."""

import io
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from sandhi_core.serving.look import NEW_TOKENS, main
from tests.exported import RANKS, make_case, make_models


def greedy(model: PreTrainedModel, tokens: list[int]) -> list[int]:
    asked = len(tokens)
    while len(tokens) < asked + NEW_TOKENS:
        with torch.inference_mode():
            tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
        if tokens[-1] == model.config.eos_token_id:
            break
    return tokens[asked:]


def test_prompts_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = make_case(tmp_path, make_models(tmp_path / "models"), RANKS)
    root, _ = case.exported()
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n\nde f"))
    assert main([str(root / "single")]) == 0
    model, tokenizer = case.swapped("single"), AutoTokenizer.from_pretrained(root / "single")
    continued = [
        tokenizer.decode(greedy(model, tokenizer(prompt).input_ids), skip_special_tokens=True)
        for prompt in ("abc", "de f")
    ]
    assert capsys.readouterr().out == "".join(text.replace("\n", "\\n") + "\n" for text in continued)


def test_a_directory_that_is_none_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "error: checkpoint: model none file " in err
