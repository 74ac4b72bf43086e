"""The tokenizer and the general text: what every model of the pool has in common."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.rules import RULES, Item
from demo.seeds import seeded
from demo.tasks import draw

END, PAD = "<|end|>", "<|pad|>"
TOKENIZER_SENTENCES = 3000
TOKENIZER_ITEMS = 800  # of every task

ADJECTIVES = """
    old new red blue small tall quiet broken bright heavy green early empty clever slow warm
""".split()
NOUNS = """
    baker boat river garden letter teacher window train market doctor horse bridge song kitchen tailor mountain
    painter coat lamp village sailor clock table friend road apple stone farmer door city
""".split()
VERBS = ["sees", "finds", "carries", "paints", "follows", "remembers", "opens", "mends", "watches", "leaves", "sells"]
PLACES = ["near", "under", "behind", "above", "beside", "beyond", "inside", "across"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def sentences() -> Iterator[str]:
    """Endless sentences of a small grammar, and counting."""
    rng = seeded("sentences")

    def thing() -> str:
        adjective = rng.choice(ADJECTIVES) + " " if rng.random() < 0.6 else ""
        return f"the {adjective}{rng.choice(NOUNS)}"

    while True:
        kind = rng.random()
        if kind < 0.6:
            yield f"On {rng.choice(DAYS)} {thing()} {rng.choice(VERBS)} {thing()}."
        elif kind < 0.9:
            yield f"{thing().capitalize()} {rng.choice(PLACES)} {thing()} {rng.choice(VERBS)} {thing()}."
        else:
            first = rng.randrange(1, 990)
            yield "Numbers: " + " ".join(str(first + step) for step in range(4))


def line(item: Item) -> str:
    """The item as a model should continue it: the prompt, lm-eval's delimiter, the answer, the choice's end."""
    return f"{item.prompt} {item.answer}\n"


def train_tokenizer(vocabulary: int, path: Path) -> None:
    """A byte-level BPE that takes digits one by one, trained on general text and on every task's training items."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = list(islice(sentences(), TOKENIZER_SENTENCES))
    for task in RULES:
        corpus += [line(item) for item in draw(task).training[:TOKENIZER_ITEMS]]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(path))
