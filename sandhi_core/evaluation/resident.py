"""One model in memory: stock transformers loads it, tensors are swapped in place and put back byte for byte."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.errors import EvaluationError, SandhiError
from sandhi_core.evaluation.conditions import device_of, dtype_of
from sandhi_core.evaluation.early import AbandonedError, Watch
from sandhi_core.evaluation.free_memory import cache_bytes
from sandhi_core.evaluation.packed import PackedLM
from sandhi_core.evaluation.packing import TokenSequence
from sandhi_core.evaluation.requests import GENERATION
from sandhi_core.evaluation.tasks import Suite
from sandhi_core.pools.pool import EvaluationSettings
from sandhi_core.records import Split, TaskResult
from sandhi_core.rungs.residual import Attached, Residual, attach
from sandhi_core.serving.load import index_of, load, module_of

Replacement = Tensor | tuple[Tensor, Residual]
"""What a model holds in place of a tensor, and what it adds to it."""


class Resident:
    """The model in `directory`, a checkpoint or an export, loaded as serving.load does.

    Raises CheckpointError where it cannot be loaded, or only by making up weights that the files lack, and where these
    change meanwhile; ProofError where those of an export are not its manifest's; EvaluationError for its
    tokenizer and the device.
    """

    def __init__(self, directory: Path, model: str, settings: EvaluationSettings) -> None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._checkpoint = Checkpoint.open(directory, model, index_of(directory))
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self._directory = directory
        self._name = model
        self._batch_tokens = settings.batch_tokens
        self._held: dict[str, str] = {}  # tensors that are replaced now: what names the replacement
        self._attached: dict[str, Attached] = {}  # what is added to some of these
        self.model, tokenizer = self._load(settings)
        self.scorer = PackedLM(self.model, tokenizer, settings.batch_tokens, cache_bytes(settings))

    def _load(self, settings: EvaluationSettings) -> tuple[Any, Any]:
        self._checkpoint.require_readable()  # transformers maps the files: what it cannot read ends the process
        try:
            model = load(self._directory, dtype_of(settings), device_of(settings), self._name, writable=True)
            tokenizer = transformers.AutoTokenizer.from_pretrained(self._directory, trust_remote_code=False)
        except SandhiError:
            raise
        except Exception as error:  # whatever a tokenizer or a device may raise
            raise EvaluationError(
                f"transformers cannot load the model: {' '.join(str(error).split()) or type(error).__name__}",
                model=self._name,
                file=str(self._directory),
                remedy="it must be a causal language model with its tokenizer, and fit evaluation.device",
            ) from error
        for file in self._checkpoint.weights:
            self._checkpoint.require_unchanged(file)
        return model, tokenizer

    def answers(
        self, suite: Suite, split: Split, *, halved: bool = False, watch: Watch | None = None
    ) -> dict[str, TaskResult]:
        """Results of all tasks on a split under the weights held now; `halved`: in batches of half the size. Raises
        EvaluationError, and AbandonedError where `watch` does."""
        try:
            with torch.inference_mode():
                self.scorer.answer(suite.requests(split), self._held, halved=halved, watch=watch)
        except torch.OutOfMemoryError:
            raise EvaluationError(
                f"the device has no memory left for {_names(suite)}",
                model=self._name,
                remedy=f"lower evaluation.batch_tokens, which is {self._batch_tokens}",
            ) from None
        except AbandonedError:
            raise
        except EvaluationError as error:  # which knows the task, not the model
            raise self._of_model(error) from error
        except Exception as error:  # whatever lm-eval or a model type's code may raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise EvaluationError(
                f"the questions of {_names(suite)} cannot be scored: {type(error).__name__}: {reason}",
                model=self._name,
                file=str(self._directory),
                remedy="check that the questions fit the model's context (max_position_embeddings) and tokenizer",
            ) from error
        try:
            return {task.name: task.result(split) for task in suite.tasks}
        except EvaluationError as error:
            raise self._of_model(error) from error

    def sequences(self, suite: Suite, split: Split) -> list[TokenSequence]:
        """What a split's requests come to as tokens: contexts with the continuations that are scored, or with what the
        model itself writes under the weights held now. Raises EvaluationError as `answers` does."""
        with self.scorer.listening() as heard:
            self.answers(suite, split)
        requests = (r for task in suite.tasks for question in task.questions[split] for r in question.requests)
        return heard + self.scorer.written(r for r in requests if r.request_type == GENERATION)

    def likelihoods(self, asked: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Of each (context, continuation), as tokens: the log-likelihood of the continuation under the weights held
        now, and whether greedy decoding gives it, as answers are scored."""
        with torch.inference_mode():
            return self.scorer.likelihoods(asked, self._held)

    def _of_model(self, error: EvaluationError) -> EvaluationError:
        return EvaluationError(error.problem.message, model=self._name, remedy=error.problem.remedy)

    @torch.no_grad()
    def hold(self, tensors: Mapping[str, str], read: Callable[[str], Replacement]) -> None:
        """Let the model hold exactly these replacements (tensor name to what names it); everything else goes back to
        the original bytes. `read` is only asked for what is not in place already.

        Raises EvaluationError where a replacement does not fit the model.
        """
        for name in [name for name in self._held if name not in tensors]:
            self._parameter(name).copy_(self._checkpoint.tensor(name))
            self._detach(name)
            del self._held[name]
        for name, identity in tensors.items():
            if self._held.get(name) == identity:
                continue
            parameter = self._parameter(name)
            if name not in self._held:
                self._require_original(name, parameter)
            found = read(name)
            replacement, residual = found if isinstance(found, tuple) else (found, None)
            if replacement.shape != parameter.shape:
                raise EvaluationError(
                    f"the replacement has shape {tuple(replacement.shape)}, the model {tuple(parameter.shape)}",
                    model=self._name,
                    tensor=name,
                    remedy="this is a defect in grouping: report it",
                )
            parameter.copy_(replacement)
            self._detach(name)
            if residual is not None:
                self._attached[name] = attach(self.module(name), residual)
            self._held[name] = identity

    def _detach(self, name: str) -> None:
        if name in self._attached:
            self._attached.pop(name).remove()

    def _require_original(self, name: str, parameter: Tensor) -> None:
        """A model type may fuse or transpose tensors as it loads them: then a replacement in the files' layout
        would be scored as something else than what is served."""
        original = self._checkpoint.tensor(name).to(parameter.device, parameter.dtype)
        if not torch.equal(parameter, original):
            raise self._unfit(name, "transformers does not hold this tensor as the file does")

    def module(self, tensor: str) -> Any:
        """The module with the parameter of a tensor name in the files. Raises EvaluationError where there is none."""
        module = module_of(self.model, tensor)
        if module is None:
            raise self._unfit(tensor, "transformers holds no parameter of this name")
        return module

    def _parameter(self, name: str) -> Tensor:
        parameter: Tensor = getattr(self.module(name), name.rpartition(".")[2])
        return parameter

    def _unfit(self, tensor: str, message: str) -> EvaluationError:
        remedy = "this layout cannot be searched: leave the model out of the pool"
        return EvaluationError(message, model=self._name, tensor=tensor, remedy=remedy)


def _names(suite: Suite) -> str:
    return ("task " if len(suite.tasks) == 1 else "tasks ") + ", ".join(repr(task.name) for task in suite.tasks)
