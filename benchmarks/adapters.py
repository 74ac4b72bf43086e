"""Whether a real vLLM answers from a base and its adapters as our loader answers from the models they were scored as.

    python -m benchmarks.adapters expect EXPORT ANSWERS.json < PROMPTS    (a prompt a line)
    PYTHON_OF_VLLM benchmarks/adapters.py serve EXPORT ANSWERS.json

vLLM needs an environment of its own (its pins are others than ours), so that the two steps are two programs and the
second imports nothing of Sandhi. Prints how many tokens of greedy answers agree, by model.
"""

import json
import sys
from pathlib import Path
from typing import Any

TOKENS = 16


def expect(export: Path, answers: Path) -> None:
    """Writes every adapter's greedy tokens, in float32, by our loader."""
    import torch
    from transformers import AutoTokenizer

    from sandhi_core.layout import read_manifest
    from sandhi_core.serving.load import load

    plan = read_manifest(export).stock
    assert plan is not None, "the export has no adapters"
    prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    found: dict[str, Any] = {}
    for base in plan.bases:
        for name, adapter in base.adapters.items():
            model, tokenizer = load(export / name, dtype=torch.float32), AutoTokenizer.from_pretrained(export / name)
            ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
            # Token by token from the logits: a model that only chooses answers may end at once when it generates.
            tokens = [_greedy(model, prompt) for prompt in ids]
            found[name] = {
                "base": base.directory,
                "adapter": adapter.directory,
                "rank": plan.max_rank,
                "ids": ids,
                "tokens": tokens,
            }
    answers.write_text(json.dumps(found))


def _greedy(model: Any, prompt: list[int]) -> list[int]:
    import torch

    ids = list(prompt)
    with torch.no_grad():
        for _ in range(TOKENS):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def serve(export: Path, answers: Path) -> bool:
    """One engine a base; prints and returns whether every answer is the expected one."""
    from importlib import import_module

    vllm, lora = import_module("vllm"), import_module("vllm.lora.request")
    expected = json.loads(answers.read_text())
    same = True
    for base in sorted({model["base"] for model in expected.values()}):
        held = {name: model for name, model in expected.items() if model["base"] == base}
        adapters = [name for name, model in held.items() if model["adapter"] is not None]
        engine = vllm.LLM(
            str(export / base),
            dtype="float32",
            enable_lora=True,
            max_loras=max(len(adapters), 1),
            max_lora_rank=max(model["rank"] for model in held.values()),
            enforce_eager=True,
            max_model_len=128,
            kv_cache_memory_bytes=64 << 20,
        )
        settings = vllm.SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        for number, (name, model) in enumerate(sorted(held.items()), 1):
            request = (
                None if model["adapter"] is None else lora.LoRARequest(name, number, str(export / model["adapter"]))
            )
            prompts = [{"prompt_token_ids": ids} for ids in model["ids"]]
            outputs = engine.generate(prompts, settings, lora_request=request)
            pairs = list(zip([list(o.outputs[0].token_ids) for o in outputs], model["tokens"], strict=True))
            equal = sum(a == b for a, b in pairs)
            tokens = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True))
            print(f"{base} {name}: {equal} of {len(pairs)} answers and {tokens} of {TOKENS * len(pairs)} tokens agree")
            same &= equal == len(pairs)
    return same


if __name__ == "__main__":
    step, export_root, file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if step == "expect":
        expect(export_root, file)
    else:
        sys.exit(0 if serve(export_root, file) else 1)
