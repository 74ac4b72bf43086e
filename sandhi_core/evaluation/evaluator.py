"""Scores of one model under changed weights: a single resident model, tensors swapped in place and put back."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from sandhi_core.errors import EvaluationError
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.evaluation.scorer import PlainScorer, Scorer
from sandhi_core.evaluation.tasks import Suite, load_tasks
from sandhi_core.pool import EvaluationSettings, ModelEntry
from sandhi_core.records import Component, Evaluation, Fingerprint, Split, TaskResult, digest_of
from sandhi_core.store import Store


def weights_key(fingerprint: str, tensors: Mapping[str, str]) -> str:
    """Names the weights of a checkpoint with some tensors (name to digest) replaced."""
    return digest_of({"fingerprint": fingerprint, "tensors": dict(tensors)})


def noise_key(fingerprint: str, seed: int, layer: int, component: Component) -> str:
    """Names the weights of a checkpoint with noise in one component (profile.noisy decides the bytes)."""
    return digest_of({"fingerprint": fingerprint, "noise": [seed, layer, component]})


@dataclass(frozen=True)
class Weights:
    """A checkpoint's weights with some tensors replaced. `replacements` is only called when they must be scored."""

    key: str
    replacements: Callable[[], Mapping[str, Tensor]] = field(default=dict)


def merged_weights(fingerprint: Fingerprint, tensors: Mapping[str, str], store: Store) -> Weights:
    """The checkpoint with shared tensors (name to digest) from the store in place of its own."""
    return Weights(
        weights_key(fingerprint.digest, tensors),
        lambda: {name: store.tensor(digest) for name, digest in tensors.items()},
    )


class Evaluator:
    """Scores one model. The model is loaded by stock transformers at the first score that is not in the log.

    `evaluated` is called with the seconds of every fresh evaluation; `evaluations` counts them.
    """

    def __init__(
        self,
        directory: Path,
        fingerprint: Fingerprint,
        entry: ModelEntry,
        settings: EvaluationSettings,
        log: ScoreLog,
        cache_directory: Path,
        evaluated: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._directory = directory
        self._fingerprint = fingerprint
        self._entry = entry
        self._settings = settings
        self._log = log
        self._evaluated = evaluated
        self.suite = load_tasks(entry, settings, cache_directory)
        self.resident: Resident | None = None
        self.evaluations = 0

    def evaluate(self, split: Split, weights: Weights, lowest_layer: int = 0) -> Evaluation:
        """Score `weights` on a split, or find the score in the log. `lowest_layer`: no layer below it is changed.

        Raises EvaluationError where a replacement does not fit the model.
        """
        context = self._context(split)
        known = self._log.get(weights.key, context)
        if known is not None:
            return known
        started = time.monotonic()
        if self.resident is None:
            self.resident = Resident(self._directory, self._entry.name, self._settings)
        self.resident.hold(weights.replacements())
        tasks = _answers(self.suite, split, self.resident.scorer, lowest_layer)
        evaluation = Evaluation(weights=weights.key, context=context, split=split, tasks=tasks)
        self._log.add(evaluation)
        self.evaluations += 1
        self._evaluated(time.monotonic() - started)
        return evaluation

    def recorded(self, split: Split, weights: str) -> Evaluation:
        """The score that these weights were given earlier. Raises EvaluationError where there is none."""
        known = self._log.get(weights, self._context(split))
        if known is None:
            raise EvaluationError(
                f"the {split} score of the chosen weights is not in the score log",
                model=self._entry.name,
                remedy="build again: the stage that made it runs anew where its settings changed",
            )
        return known

    def _context(self, split: Split) -> str:
        """Everything besides the weights that decides a score."""
        settings = self._settings
        return digest_of(
            {
                "tasks": [self.suite.identity, [[t.name, t.metric, t.filter] for t in self.suite.tasks]],
                "split": split,
                "splits": settings.splits.model_dump(mode="json"),
                "seed": settings.seed,
                "dtype": str(_dtype(settings)),
                "device": _device(settings).partition(":")[0],
                "batch_tokens": settings.batch_tokens,
                "versions": {p: version(p) for p in ("torch", "transformers", "lm_eval")},
            }
        )


def score_directory(
    directory: Path, entry: ModelEntry, settings: EvaluationSettings, split: Split, cache_directory: Path
) -> dict[str, TaskResult]:
    """What stock transformers makes of the files in `directory`; nothing is logged or looked up."""
    resident = Resident(directory, entry.name, settings)
    return _answers(load_tasks(entry, settings, cache_directory), split, resident.scorer, 0)


def _answers(suite: Suite, split: Split, scorer: Scorer, lowest_layer: int) -> dict[str, TaskResult]:
    with torch.inference_mode():
        scorer.answer(suite.requests(split), lowest_layer)
    return {task.name: task.result(split) for task in suite.tasks}


class Resident:
    """One model in memory, its original tensors a file view away."""

    def __init__(self, directory: Path, model: str, settings: EvaluationSettings) -> None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        try:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=_dtype(settings))
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise EvaluationError(
                f"transformers cannot load the model: {' '.join(str(error).split())}",
                model=model,
                file=str(directory),
                remedy="the directory must hold a causal language model and its tokenizer",
            ) from error
        self._name = model
        self.model: Any = loaded.to(_device(settings)).eval()
        self._originals: dict[str, Tensor] = {}  # of the tensors that are replaced now
        self.scorer: Scorer = PlainScorer(self.model, tokenizer, settings.batch_tokens)

    @torch.no_grad()
    def hold(self, replacements: Mapping[str, Tensor]) -> None:
        """Let the model hold exactly these replacements: others go back to the original bytes."""
        for name in [n for n in self._originals if n not in replacements]:
            self._parameter(name).copy_(self._originals.pop(name))
        for name, tensor in replacements.items():
            parameter = self._parameter(name)
            if parameter.shape != tensor.shape:
                raise EvaluationError(
                    f"the replacement has shape {tuple(tensor.shape)}, the model {tuple(parameter.shape)}",
                    model=self._name,
                    tensor=name,
                    remedy="this is a defect in grouping: report it",
                )
            if name not in self._originals:
                self._originals[name] = parameter.clone()
            parameter.copy_(tensor)

    def _parameter(self, name: str) -> Tensor:
        """The model's parameter of a tensor name in the files, which may lack transformers' prefix."""
        for candidate in (name, f"model.{name}"):
            try:
                parameter: Tensor = self.model.get_parameter(candidate)
                return parameter
            except AttributeError:
                continue
        raise EvaluationError(
            "transformers holds no parameter of this name",
            model=self._name,
            tensor=name,
            remedy="this layout cannot be searched: leave the model out of the pool",
        )


def _device(settings: EvaluationSettings) -> str:
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(settings: EvaluationSettings) -> "torch.dtype | str":
    if settings.dtype != "auto":
        dtype: torch.dtype = getattr(torch, settings.dtype)
        return dtype
    return torch.float32 if _device(settings) == "cpu" else "auto"
