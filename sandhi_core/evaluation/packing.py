"""Token sequences that begin alike, laid out as one tree: what they share is computed once.

The tokens of a tree stand in one row. A token sees its ancestors and itself and sits at the position it has in its own
sequence, so every sequence is scored as if it stood alone. Sources: tree attention as in SpecInfer (Miao et al., 2024),
prefix sharing as in RadixAttention (Zheng et al., 2024).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Budgets of a tree that are tried."""

LAYER_START = 4e6
"""What starting a layer costs, in multiply-adds of its matrices, about as found on two CPU cores. It decides how large
trees are, and so how fast scores come, not what they are."""


@dataclass(frozen=True)
class TokenSequence:
    """What one request asks: the input `tokens`, and the `targets` that the last len(targets) of them predict."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]


def sequence_of(context: Sequence[int], continuation: Sequence[int], max_length: int) -> TokenSequence:
    """A request as lm-eval's HF model cuts it: from the left, to max_length inputs; the last token is only a target.

    Raises ValueError where there is nothing to predict, nothing to predict it from, or, as there, more to predict than
    max_length.
    """
    if not context or not continuation:
        raise ValueError("a request needs a context and a continuation")
    if len(continuation) > max_length:
        raise ValueError(f"a continuation of {len(continuation)} tokens exceeds the model's length of {max_length}")
    whole = (*context, *continuation)[-(max_length + 1) :]
    return TokenSequence(whole[:-1], tuple(continuation))


@dataclass(frozen=True)
class Pack:
    """One tree of T tokens. `parents`: [T], the row before a token in its sequence, -1 at a root. `rows`: [R], the rows
    whose predictions are scored. `requests`: (number of the request, its places in `rows`, its targets)."""

    tokens: Tensor  # [T], int64
    positions: Tensor  # [T], int64
    parents: tuple[int, ...]
    rows: Tensor  # [R], int64
    requests: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]

    def visible(self, window: int | None = None) -> npt.NDArray[np.bool_]:
        """[T, T]: whether the token of a row sees that of a column; with `window`, only if it is less than that many
        positions before it."""
        seen = np.zeros((len(self.parents), len(self.parents)), dtype=bool)
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                seen[row] = seen[parent]
            seen[row, row] = True
        if window is not None:
            at = self.positions.numpy()
            seen &= at[:, None] - at[None, :] < window
        return seen


class _Builder:
    """A tree that grows by sequences in lexicographic order: each shares most with the one before."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.parents: list[int] = []
        self.rows: dict[int, int] = {}  # row of the tree to its place among the scored ones
        self.requests: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self._last: tuple[int, ...] = ()
        self._path: list[int] = []

    def new_tokens(self, sequence: TokenSequence) -> int:
        return len(sequence.tokens) - self._common(sequence.tokens)

    def add(self, number: int, sequence: TokenSequence) -> None:
        del self._path[self._common(sequence.tokens) :]
        for token in sequence.tokens[len(self._path) :]:
            self.parents.append(self._path[-1] if self._path else -1)
            self.positions.append(len(self._path))
            self._path.append(len(self.tokens))
            self.tokens.append(token)
        self._last = sequence.tokens
        predicting = self._path[-len(sequence.targets) :]
        places = tuple(self.rows.setdefault(row, len(self.rows)) for row in predicting)
        self.requests.append((number, places, sequence.targets))

    def built(self) -> Pack:
        return Pack(
            torch.tensor(self.tokens),
            torch.tensor(self.positions),
            tuple(self.parents),
            torch.tensor(list(self.rows)),
            tuple(self.requests),
        )

    def _common(self, tokens: tuple[int, ...]) -> int:
        shared = 0
        for before, token in zip(self._last, tokens, strict=False):
            if before != token:
                break
            shared += 1
        return shared


def pack(sequences: Sequence[TokenSequence], budget: int, border: float = math.inf) -> list[Pack]:
    """All `sequences` in trees of at most `budget` tokens (one longer sequence has a tree of its own), those of more
    than `border` tokens apart from the others. A function of the sequences alone: nothing that was scored before
    changes what is computed together."""
    packs: list[Pack] = []
    for beyond in (False, True):
        tree = _Builder()
        numbers = (n for n, sequence in enumerate(sequences) if (len(sequence.tokens) > border) == beyond)
        for number in sorted(numbers, key=lambda n: (sequences[n].tokens, sequences[n].targets, n)):
            sequence = sequences[number]
            if tree.requests and len(tree.tokens) + tree.new_tokens(sequence) > budget:
                packs.append(tree.built())
                tree = _Builder()
            tree.add(number, sequence)
        if tree.requests:
            packs.append(tree.built())
    return packs


def cost(packs: Sequence[Pack], width: int) -> float:
    """What a pass over `packs` costs, in tokens of a layer's matrices: attention over a tree of T tokens in a model of
    that width adds T / (6 width) of these a token, and starting a layer as much as LAYER_START / width^2 tokens."""
    sizes = [len(one.parents) for one in packs]
    return sum(size + size * size / (6 * width) + LAYER_START / width**2 for size in sizes)


def cheapest(
    sequences: Sequence[TokenSequence], width: int, most: int, border: float = math.inf
) -> tuple[int, list[Pack]]:
    """The budget, at most `most`, that makes a pass cheapest, and the packs of that budget. Small trees spare
    attention, large ones repeat less of what sequences share."""
    budgets = [budget for budget in SIZES if budget <= most] or [most]
    tried = [(budget, pack(sequences, budget, border)) for budget in budgets]
    return min(tried, key=lambda t: cost(t[1], width))


@dataclass(frozen=True)
class Answer:
    """Of a sequence's targets: the log-likelihood of each, and the greedy choice in its place."""

    targets: tuple[int, ...]
    own: list[float]
    chosen: tuple[int, ...]


def whole(answer: Answer) -> tuple[float, bool]:
    """As lm-eval wants it: of all targets together."""
    return sum(answer.own), answer.chosen == answer.targets


def answered(one: Pack, logits: Tensor) -> dict[int, Answer]:
    """By number of the sequence."""
    likelihoods = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    places = torch.tensor([p for _, at, _ in one.requests for p in at], device=logits.device)
    targets = torch.tensor([t for *_, wanted in one.requests for t in wanted], device=logits.device)
    own = likelihoods[places, targets].tolist()
    chosen = likelihoods.argmax(dim=-1)[places].tolist()
    answers, at = {}, 0
    for number, _, wanted in one.requests:
        span = slice(at, at + len(wanted))
        answers[number] = Answer(wanted, own[span], tuple(chosen[span]))
        at = span.stop
    return answers
