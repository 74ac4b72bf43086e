"""What the tensors beside the projections act on while a model answers questions of its profile split.

Kept below `inputs/` with the moments of the projections' inputs (see inputs), a file a tensor.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Linear

from sandhi_core.checkpoints.side_files import keep, kept
from sandhi_core.errors import EvaluationError
from sandhi_core.evaluation.evaluator import Evaluator
from sandhi_core.evaluation.resident import Resident
from sandhi_core.records import Fingerprint
from sandhi_core.rungs.grams import Gram, GramSum
from sandhi_core.threads import steady


@dataclass(frozen=True)
class Use:
    """`rows`: how much each element of a vector, or each row of a table, is used: of a norm E[z^2] by channel, with z
    the input over its root mean square; of embeddings the part of all tokens. `whole`: of a bias, the mean squared
    length of the outputs that it is added to. `gram`: E[x x^T] of what a head reads. None where it is nothing such."""

    rows: Tensor | None = None
    whole: Tensor | None = None
    gram: Gram | None = None


class Uses:
    """Those of one model on its profile split, all collected in one pass when first asked for. `folder` is the
    model's own below `inputs/`."""

    def __init__(self, folder: Path, fingerprint: Fingerprint, evaluator: Evaluator) -> None:
        self._model = fingerprint.model
        self._folder = folder
        slots = {slot.tensor for slot in fingerprint.slots} | set(fingerprint.private)
        weights = (t.name for t in fingerprint.tensors if t.name.endswith((".weight", ".bias")))
        self._names = [name for name in weights if name not in slots]
        self._evaluator = evaluator

    def of(self, tensor: str) -> Use:
        """Raises EvaluationError where the questions cannot be scored, or what was found cannot be kept."""
        found = kept(self._file(tensor))
        if found is None:
            self._collect()
            found = kept(self._file(tensor))
        if found is None:
            raise EvaluationError(
                "what this tensor acts on could not be kept, or no question reaches it",
                model=self._model,
                tensor=tensor,
                file=str(self._folder),
                remedy="give the artifact root space, or leave grouping.besides out, and build again",
            )
        blocks = tuple(block for name, block in sorted(found.items()) if name.isdecimal())
        gram = Gram(blocks, torch.zeros(sum(map(len, blocks)))) if blocks else None
        return Use(found.get("rows"), found.get("whole"), gram)

    def _collect(self) -> None:
        held = self._evaluator.originals()
        held.answers(self._evaluator.suite, "profile")  # what is computed once is computed before anything is counted
        held.scorer.forget()
        sums = _Sums()
        with sums.watching(held, self._names), steady(held.model.device):
            held.answers(self._evaluator.suite, "profile")
        held.scorer.forget()
        for name in self._names:
            if found := sums.found(name):
                if not all(bool(part.isfinite().all()) for part in found.values()):
                    raise EvaluationError(
                        "what this tensor acts on is not finite, or too large to be squared",
                        model=self._model,
                        tensor=name,
                        remedy="score in float32, or check the weights of this layer and those before it",
                    )
                keep(self._file(name), found)

    def _file(self, tensor: str) -> Path:
        return self._folder / f"{tensor}.safetensors"


@dataclass
class _Sums:
    """Adds up as a model runs; a token of a packed tree counts once."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)
    grams: dict[str, GramSum] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def watching(self, held: Resident, names: Sequence[str]) -> Iterator[None]:
        hooks = [hook for name in names for hook in self._watch(held.module(name), name, held.model)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def found(self, name: str) -> dict[str, Tensor]:
        found = {kind: sums[name] / self.count[name] for kind, sums in self._both.items() if name in sums}
        if name in self.grams:
            found |= {f"{number:04d}": block for number, block in enumerate(self.grams[name].mean().blocks)}
        return found

    @property
    def _both(self) -> dict[str, dict[str, Tensor]]:
        return {"rows": self.rows, "whole": self.whole}

    def _watch(self, module: Any, name: str, model: Any) -> Iterator[Any]:
        if name.endswith(".bias"):
            yield module.register_forward_hook(lambda _, given, output: self._outputs(name, output))
        elif isinstance(module, Embedding):
            size = module.num_embeddings
            yield module.register_forward_pre_hook(lambda _, given: self._tokens(name, given[0], size))
            head = model.get_output_embeddings()
            if head.weight is module.weight:
                yield head.register_forward_pre_hook(lambda _, given: self._read(name, given[0]))
        elif isinstance(module, Linear):
            yield module.register_forward_pre_hook(lambda _, given: self._read(name, given[0]))
        else:
            yield module.register_forward_pre_hook(lambda _, given: self._normalised(name, given[0]))

    def _normalised(self, name: str, inputs: Tensor) -> None:
        squares = _matrix(inputs).square()
        self._add(self.rows, name, squares / squares.mean(dim=1, keepdim=True).clamp_min(torch.finfo().tiny))

    def _outputs(self, name: str, outputs: Tensor) -> None:
        self._add(self.whole, name, _matrix(outputs).square().sum(dim=1, keepdim=True))

    def _tokens(self, name: str, tokens: Tensor, size: int) -> None:
        counted = torch.bincount(tokens.detach().reshape(-1).cpu(), minlength=size).double()
        self.rows[name] = self.rows.get(name, 0.0) + counted
        self.count[name] = self.count.get(name, 0) + tokens.numel()

    def _read(self, name: str, inputs: Tensor) -> None:
        self.grams.setdefault(name, GramSum(inputs.shape[-1])).add(inputs)

    def _add(self, sums: dict[str, Tensor], name: str, values: Tensor) -> None:
        sums[name] = sums.get(name, 0.0) + values.sum(dim=0, dtype=torch.float64)
        self.count[name] = self.count.get(name, 0) + len(values)


def _matrix(values: Tensor) -> Tensor:
    return values.detach().reshape(-1, values.shape[-1]).to("cpu", torch.float32)
