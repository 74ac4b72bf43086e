"""Trains models of the pool, on one thread: `python -m demo.train SIZE FOLDER`, model names on stdin.

FOLDER holds tokenizer.json and, for a specialist, models/base; a model is written to models/NAME. Everything random
is seeded by the model's name, so the bytes depend neither on the order of the models nor on how many such processes
share them. Lines on stdout are `NAME STEPS` while a model trains and `NAME saved` once it is written.
"""

from __future__ import annotations

import math
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from demo.roster import SIZES, Model, Size
from demo.rules import Item
from demo.seeds import seed, seeded
from demo.tasks import draw
from demo.text import END, PAD, line, sentences

MAX_TOKENS = 64
PROMPT_WEIGHT = 0.2  # the base also learns, a little, to write the questions
WARMUP = 20
REPORT_EVERY = 5
SORTED_BATCHES = 6  # rows of so many batches are grouped by length, to pad less

Row = tuple[list[int], int]  # token ids, and how many of them belong to the prompt


def encode(tokenizer: Any, items: list[Item]) -> list[Row]:
    """Tokenise items as lm-eval will: prompt and answer as one text, cut where the prompt's own tokens end."""
    whole = tokenizer([line(item) for item in items])["input_ids"]
    asked = tokenizer([item.prompt for item in items])["input_ids"]
    return [(ids, len(prompt)) for ids, prompt in zip(whole, asked, strict=True)]


def rows_for(model: Model, size: Size, tokenizer: Any) -> list[Row]:
    """The rows a model is trained on, in order: a task's items again and again, or one pass of the base's mixture."""
    count = model.steps * size.batch
    rng = seeded("rows", model.name)
    if model.task is not None:
        rows = encode(tokenizer, draw(model.task).training)
        epochs = math.ceil(count / len(rows))
        return [row for _ in range(epochs) for row in rng.sample(rows, len(rows))][:count]
    tasks = size.specialities()
    each = round(count * size.task_share / len(tasks))
    rows = encode(tokenizer, [item for task in tasks for item in rng.choices(draw(task).training, k=each)])
    texts = [text + "\n" for text in islice(sentences(), count - len(rows))]
    rows += [(ids, 0) for ids in tokenizer(texts)["input_ids"]]
    rng.shuffle(rows)
    return rows


def batches(rows: list[Row], batch: int, name: str) -> list[list[Row]]:
    """Cut rows into batches of similar length, in an order that does not depend on the length."""
    rng = seeded("batches", name)
    cut: list[list[Row]] = []
    for start in range(0, len(rows), batch * SORTED_BATCHES):
        near = sorted(rows[start : start + batch * SORTED_BATCHES], key=lambda row: len(row[0]))
        groups = [near[index : index + batch] for index in range(0, len(near), batch)]
        cut += rng.sample(groups, len(groups))
    return cut


def collate(rows: list[Row], pad: int, prompt_weight: float) -> tuple[Tensor, Tensor]:
    """Padded ids and, for each position, the weight of predicting the token after it."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), width), pad)
    weights = torch.zeros(len(rows), width - 1)
    for index, (row, asked) in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        weights[index, : len(row) - 1] = 1.0
        weights[index, : max(asked - 1, 0)] = prompt_weight
    return ids, weights


def create(model: Model, size: Size, tokenizer: Any, folder: Path) -> Any:
    """The network to train: the base's weights for a specialist, random ones otherwise.

    A specialist's embedding, which is also its head, stays as it is: the specialists share it exactly.
    """
    if model.base is not None:
        network = LlamaForCausalLM.from_pretrained(folder / "models" / model.base, dtype=torch.float32)
        network.get_input_embeddings().weight.requires_grad_(False)
        return network
    torch.manual_seed(seed("weights", model.name))
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=model.hidden,
            intermediate_size=model.hidden * 11 // 4,
            num_hidden_layers=model.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_TOKENS,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def loss_of(network: Any, ids: Tensor, weights: Tensor) -> Tensor:
    """Weighted cross-entropy; the head is computed only where a token is to be learnt."""
    kept = weights > 0
    hidden = network.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[kept]
    losses = torch.nn.functional.cross_entropy(network.lm_head(hidden), ids[:, 1:][kept], reduction="none")
    return (losses * weights[kept]).sum() / weights.sum()


def fit(network: Any, model: Model, size: Size, rows: list[Row], pad: int) -> None:
    """AdamW with a short warm-up and a cosine, one pass over the rows."""
    parent = os.getppid()
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=model.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    network.train()
    for step, batch in enumerate(batches(rows, size.batch, model.name)):
        if os.getppid() != parent:
            sys.exit("the process that started this training is gone")
        ids, weights = collate(batch, pad, 0.0 if model.task else PROMPT_WEIGHT)
        cosine = 0.5 * (1 + math.cos(math.pi * step / model.steps))
        optimizer.param_groups[0]["lr"] = model.rate * min(1.0, (step + 1) / WARMUP) * max(0.03, cosine)
        loss_of(network, ids, weights).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % REPORT_EVERY == 0:
            print(model.name, step + 1, flush=True)


def train(size: Size, model: Model, folder: Path) -> None:
    """Train the model and save it with its tokenizer as bfloat16."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_TOKENS,
    )
    network = create(model, size, tokenizer, folder)
    fit(network, model, size, rows_for(model, size, tokenizer), tokenizer.pad_token_id)
    target = folder / "models" / model.name
    network.eval().to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    print(model.name, "saved", flush=True)


def main(size: Size, folder: Path) -> None:
    """Train the models named on stdin, one after the other, until it closes."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    logging.disable_progress_bar()
    for name in sys.stdin:
        train(size, size.model(name.strip()), folder)


if __name__ == "__main__":
    main(SIZES[sys.argv[1]], Path(sys.argv[2]))
