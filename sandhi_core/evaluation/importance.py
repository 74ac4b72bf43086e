"""How much a model's answers depend on what each of its tensors produces, by gradients.

Sharing leaves an error in the outputs of a slot; what that costs is another matter. The log-likelihood of every answer
that is asked (of what a model writes itself, that of its own text) is derived by the outputs y of each module. An error
of a part e of their mean squared length, in no special direction, then moves it by about e * E|g|^2 * E|y|^2 / n in the
square, with gradients g and n elements of y: the first-order importance of activations (Molchanov et al. 2019,
arXiv:1906.10771, section 3.1), its two factors averaged apart as in the Kronecker-factored Fisher information (Martens
and Grosse 2015, arXiv:1503.05671, section 3).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from sandhi_core.checkpoints.side_files import keep, kept
from sandhi_core.errors import EvaluationError, of_model
from sandhi_core.evaluation.evaluator import Evaluator
from sandhi_core.evaluation.packing import TokenSequence
from sandhi_core.evaluation.resident import Resident
from sandhi_core.records import Fingerprint
from sandhi_core.threads import steady

TOKENS = 2**14
"""As many of the split's answers, evenly chosen, as have so many tokens together with what stands before them."""

BATCH = 1024
"""Tokens of one forward and backward pass; one sequence at least."""

REMEDY = "set search.errors: outputs for this pool"


class Importance:
    """That of one model on its profile split, collected when first asked for and kept in `folder`, the model's own
    below `inputs/`."""

    def __init__(self, folder: Path, fingerprint: Fingerprint, evaluator: Evaluator) -> None:
        self._model = fingerprint.model
        self._file = folder / "importance.safetensors"
        self._projections = [slot.tensor for slot in fingerprint.slots]
        weights = (t.name for t in fingerprint.tensors if t.name.endswith((".weight", ".bias")))
        self._names = [name for name in weights if name not in fingerprint.private]
        self._evaluator = evaluator
        self._found: Mapping[str, float] | None = None

    def of(self, tensor: str) -> float:
        """What an error counts that is a part of what this tensor produces; 1 on the average of projections that
        some token reaches.

        Raises EvaluationError where the questions cannot be scored, the model cannot be derived, or what was found
        cannot be kept.
        """
        with of_model(self._model):
            if self._found is None:
                self._found = self._relative()
            if tensor not in self._found:
                raise EvaluationError("no question reaches this tensor", tensor=tensor, remedy=REMEDY)
            return self._found[tensor]

    def ready(self) -> bool:
        """Collect now what is missing; whether anything was. Raises as `of` does."""
        if kept(self._file) is not None:
            return False
        held = self._evaluator.originals()
        sequences = held.sequences(self._evaluator.suite, "profile")
        held.scorer.forget()  # its states' memory is wanted
        with of_model(self._model):
            found = importance(held, sequences, self._names)
        keep(self._file, {name: torch.tensor([value], dtype=torch.float64) for name, value in found.items()})
        return True

    def _relative(self) -> dict[str, float]:
        self.ready()
        found = kept(self._file)
        if found is None:
            raise EvaluationError(
                "how much answers depend on each tensor could not be kept",
                file=str(self._file),
                remedy="give the artifact root space, and build again",
            )
        reached = [float(found[name]) for name in self._projections if name in found]
        mean = fmean(reached) if reached else 0.0
        return {name: float(value) / mean if mean > 0 else 1.0 for name, value in found.items()}


def importance(
    held: Resident, sequences: Sequence[TokenSequence], names: Sequence[str], tokens: int = TOKENS
) -> dict[str, float]:
    """By tensor name E|g|^2 E|y|^2 / n over the tokens of `sequences`, under the weights that the model holds now; of a
    table that is the head too, as embeddings. Tensors that no sequence reaches are left out.

    Raises EvaluationError where there is no sequence, the device's memory is too small, or the model's code cannot be
    derived.
    """
    chosen = _evenly(sequences, tokens)
    if not chosen:
        raise EvaluationError("no question asks for an answer", remedy=REMEDY)
    sums = _Sums()
    try:
        with _derived(held, names, sums), steady(held.model.device):
            for batch in _batches(chosen):
                _backward(held.model, batch, sums)
    except torch.OutOfMemoryError:  # a RuntimeError too
        message = "the device has no memory left to derive the model's answers"
        raise EvaluationError(message, remedy=f"free memory of the device, or {REMEDY}") from None
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise EvaluationError(f"the model's answers cannot be derived: {reason}", remedy=REMEDY) from error
    found = {
        name: sums.gradients[name] * sums.outputs[name] / count**2 / sums.size[name]
        for name, count in sums.count.items()
        if count
    }
    if broken := [name for name, value in found.items() if not math.isfinite(value)]:
        raise EvaluationError("the answers' gradients are not finite here", tensor=broken[0], remedy=REMEDY)
    return found


def _evenly(sequences: Sequence[TokenSequence], tokens: int) -> list[TokenSequence]:
    """As many as have `tokens` tokens in all, spread over the whole; one at least, if there is one."""
    stride = max(1.0, sum(len(s.tokens) for s in sequences) / tokens)
    count = min(max(int(len(sequences) / stride), 1), len(sequences))
    return [sequences[int(at * stride)] for at in range(count)]


def _batches(sequences: Sequence[TokenSequence]) -> Iterator[list[TokenSequence]]:
    """Of like lengths, so that little is padded."""
    batch: list[TokenSequence] = []
    for sequence in sorted(sequences, key=lambda s: (len(s.tokens), s.tokens, s.targets)):
        if batch and (len(batch) + 1) * len(sequence.tokens) > BATCH:
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch


class _Sums:
    """Squared lengths over tokens, by tensor name; `mask`: which positions of the batch at work are no padding."""

    mask: Tensor

    def __init__(self) -> None:
        self.outputs: dict[str, float] = defaultdict(float)
        self.gradients: dict[str, float] = defaultdict(float)
        self.count: dict[str, int] = defaultdict(int)
        self.size: dict[str, int] = {}

    def given(self, name: str, output: Tensor) -> None:
        rows = self._rows(output.detach())
        self.outputs[name] += _squares(rows)
        self.count[name] += len(rows)
        self.size[name] = rows[0].numel()
        output.register_hook(lambda gradient: self.derived(name, gradient))  # type: ignore[no-untyped-call]

    def derived(self, name: str, gradient: Tensor) -> None:
        self.gradients[name] += _squares(self._rows(gradient))

    def _rows(self, values: Tensor) -> Tensor:
        """Those of `values` [sequences, positions, ...] that are no padding; norms within heads are run with these
        before positions (gemma3) or after (qwen3)."""
        return (values if values.shape[:2] == self.mask.shape else values.transpose(1, 2))[self.mask]


def _squares(values: Tensor) -> float:
    return float(values.float().square().sum(dtype=torch.float64))


@contextmanager
def _derived(held: Resident, names: Sequence[str], sums: _Sums) -> Iterator[None]:
    """While outputs and the gradients by them are added up; the weights themselves have no gradients."""
    parameters = [p for p in held.model.parameters() if p.requires_grad]

    def watching(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: sums.given(name, output)

    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for parameter in parameters:
            parameter.requires_grad_(False)
            stack.callback(parameter.requires_grad_, True)
        # Something must be derived by, or there is no graph: what the embeddings give.
        embedding: Any = held.model.get_input_embeddings()
        hooks = [embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())]
        hooks += [held.module(name).register_forward_hook(watching(name)) for name in names]
        for hook in hooks:
            stack.callback(hook.remove)
        yield


def _backward(model: Any, batch: Sequence[TokenSequence], sums: _Sums) -> None:
    width, config = max(len(s.tokens) for s in batch), model.config
    while width in (config.num_attention_heads, config.num_key_value_heads):
        width += 1  # or positions could not be told from heads
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask, at = torch.zeros(len(batch), width, dtype=torch.bool), torch.full((len(batch), width), -1)
    for row, sequence in enumerate(batch):
        length = len(sequence.tokens)
        ids[row, :length] = torch.tensor(sequence.tokens)
        mask[row, :length] = True
        at[row, length - len(sequence.targets) : length] = torch.tensor(sequence.targets)
    ids, mask, at = (tensor.to(model.device) for tensor in (ids, mask, at))
    sums.mask = mask
    logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
    # Sequences do not see each other: the sum's gradients are each one's own.
    loss = torch.nn.functional.cross_entropy(logits[at >= 0].float(), at[at >= 0], reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
