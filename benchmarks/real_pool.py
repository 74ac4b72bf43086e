"""Makes a pool of real size: full fine-tunes of SmolLM2-135M, each on one of the demo's tasks, about five minutes each.

What is there already is kept; a model that was being trained when the run ended begins anew.
"""

import argparse
import math
import shutil
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
import yaml

from benchmarks.models import smollm2
from benchmarks.scoring import CACHE
from benchmarks.ways import say
from demo.seeds import seed, seeded
from demo.tasks import draw, write_tasks
from demo.train import Row, collate, encode, loss_of

SPECIALISTS = {"converter": "units", "inflector": "past", "chemist": "formula"}
STEPS, BATCH, RATE, WARMUP = 100, 32, 5e-5, 15
TOLD_EVERY = 20  # steps
QUESTIONS = 240  # a task; scoring one takes a CPU about a twentieth of a second
BUDGET = 0.05  # what so few questions can certify


def trained(name: str, base: Path, target: Path) -> None:
    """The base with all weights but its embedding, which is also its head, tuned on the answers of one task."""
    torch.manual_seed(seed("real", name))
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    network = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    network.get_input_embeddings().weight.requires_grad_(False)
    network.train()
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    rows, rng = encode(tokenizer, draw(SPECIALISTS[name]).training), seeded("real", "rows", name)
    begun = time.monotonic()
    for step in range(STEPS):
        loss = _step(network, learning, optimizer, _batch(rows, rng), tokenizer.pad_token_id, step)
        if (step + 1) % TOLD_EVERY == 0:
            left = (time.monotonic() - begun) / (step + 1) * (STEPS - step - 1)
            say(f"{name}: step {step + 1} of {STEPS}, loss {loss:.3f}, about {left:.0f} s left")
    aside = target.with_name(f"{target.name}.partial")
    network.eval().to(torch.bfloat16).save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.rename(target)


def _batch(rows: list[Row], rng: Random) -> list[Row]:
    return rng.sample(rows, BATCH)


def _step(network: Any, learning: list[Any], optimizer: Any, batch: list[Row], pad: int, step: int) -> float:
    ids, weights = collate(batch, pad, 0.0)
    optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARMUP) * max(0.05, 1.0 - step / STEPS)
    loss = loss_of(network, ids, weights)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(learning, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if not math.isfinite(value := loss.item()):
        raise RuntimeError(f"the loss is {value} at step {step}")
    return value


def pool(folder: Path) -> dict[str, Any]:
    """The pool file's content."""
    return {
        "name": "real",
        "models": [
            {"name": n, "path": f"models/{n}", "tasks": [{"task": f"sandhi_{t}", "metric": "acc", "budget": BUDGET}]}
            for n, t in SPECIALISTS.items()
        ],
        "evaluation": {
            "include_path": "tasks",
            "dtype": "float32",
            "device": "cpu",
            "splits": {"profile": 0.3, "search": 0.3, "holdout": 0.4},
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_pool", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make: models/, tasks/, pool.yaml")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    (options.out / "models").mkdir(parents=True, exist_ok=True)
    base = options.out / "models" / "base"
    if not base.exists():
        shutil.copytree(smollm2(CACHE), base)
    write_tasks(options.out / "tasks", QUESTIONS)
    for name in SPECIALISTS:
        if not (options.out / "models" / name).exists():
            trained(name, base, options.out / "models" / name)
    (options.out / "pool.yaml").write_text(yaml.safe_dump(pool(options.out), sort_keys=False))
    print(options.out / "pool.yaml")
    return 0


if __name__ == "__main__":
    sys.exit(main())
