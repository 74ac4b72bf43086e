"""The second moments of what goes into each projection while a model answers questions of a split."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from sandhi_core.evaluation.resident import Resident
from sandhi_core.evaluation.tasks import Suite
from sandhi_core.records import Slot, Split
from sandhi_core.rungs.grams import BLOCK, Gram, GramSum

SAME_INPUT: Mapping[str, str] = {"k": "q", "v": "q", "up": "gate"}
"""Projections that read what another of their layer reads."""


def input_grams(
    held: Resident, suite: Suite, split: Split, slots: Sequence[Slot], block: int = BLOCK
) -> dict[str, Gram]:
    """By tensor name of each slot: E[x x^T] over the tokens of the split's requests, each token of a packed tree once,
    under the weights that the model holds now.

    Raises EvaluationError where the questions cannot be scored, or a slot saw no input.
    """
    held.answers(suite, split)  # whatever is computed once (checks, drafts) is computed before anything is counted
    held.scorer.forget()
    read = {slot.tensor: _read_by(slot, slots) for slot in slots}
    sums: dict[str, GramSum] = {}
    with _watched(held, sorted(set(read.values())), sums, block):
        held.answers(suite, split)
    means = {name: found.mean() for name, found in sums.items()}
    return {name: means[source] for name, source in read.items()}


def _read_by(slot: Slot, slots: Sequence[Slot]) -> str:
    """The tensor of the slot whose input is the same."""
    wanted = SAME_INPUT.get(slot.projection, slot.projection)
    alike = (s.tensor for s in slots if (s.layer, s.component, s.projection) == (slot.layer, slot.component, wanted))
    return next(alike, slot.tensor)


@contextmanager
def _watched(held: Resident, names: Sequence[str], sums: dict[str, GramSum], block: int) -> Iterator[None]:
    def hook(name: str) -> Any:
        def seen(module: Any, arguments: tuple[Tensor, ...]) -> None:
            (inputs,) = arguments
            sums.setdefault(name, GramSum(inputs.shape[-1], block)).add(inputs)

        return seen

    hooks = [held.module(name).register_forward_pre_hook(hook(name)) for name in names]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
