"""Scores of one model under changed weights, each made once and kept by what it was made from."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sandhi_core.assignment import Assignment
from sandhi_core.errors import EvaluationError
from sandhi_core.evaluation.conditions import conditions, dtype_of
from sandhi_core.evaluation.early import AbandonedError, Watch, best
from sandhi_core.evaluation.resident import Replacement, Resident
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.evaluation.tasks import SPLITS, Suite, load_tasks
from sandhi_core.graph import STAGES
from sandhi_core.pools.pool import EvaluationSettings, ModelEntry
from sandhi_core.records import Accepts, Component, Evaluation, Fingerprint, Scores, Split, TaskResult, digest_of
from sandhi_core.rungs.residual import Residual
from sandhi_core.store import Store


def weights_key(fingerprint: str, tensors: Mapping[str, str]) -> str:
    """Names the weights of a checkpoint with some tensors (name to digest) replaced."""
    return digest_of({"fingerprint": fingerprint, "tensors": dict(tensors)})


def noise_key(fingerprint: str, seed: int, layer: int, component: Component) -> str:
    """Names the weights of a checkpoint with noise in one component; the bytes are those of profile.noisy in the
    stage's present version."""
    version = STAGES["profile"].version
    return digest_of({"fingerprint": fingerprint, "noise": [version, seed, layer, component]})


def _nothing(name: str) -> Replacement:
    raise KeyError(name)


@dataclass(frozen=True)
class Weights:
    """A checkpoint's weights with some tensors replaced. `tensors` maps the name of each to what names its new
    bytes; `read` gives them, and what is added to them when the model runs, if anything; it is only called for those
    that must be scored and are not in place already."""

    key: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[str], Replacement] = _nothing


def merged_weights(fingerprint: Fingerprint, assignment: Assignment, store: Store) -> Weights:
    """The checkpoint with an assignment's shared tensors from the store in place of its own, and their residuals."""
    tensors, adjustments = assignment.tensors, assignment.adjustments

    def read(name: str) -> Replacement:
        shared = store.tensor(tensors[name])
        if name not in adjustments:
            return shared
        added = adjustments[name]
        digests = {"up": added.up, "down": added.down, "scale": added.scale, "shift": added.shift}
        return shared, Residual(**{part: store.tensor(digest) for part, digest in digests.items() if digest})

    return Weights(weights_key(fingerprint.digest, assignment.identities), assignment.identities, read)


class Evaluator:
    """Scores one model. The model is loaded by stock transformers at the first score that is not in the log.

    `evaluated` is called with the seconds of every fresh evaluation; `evaluations` counts them. `original`: the
    checkpoint's own weights. `unchanged` is called when the model has been loaded, and raises where its files are not
    those of the fingerprint.
    Raises TaskError where a task cannot be built.
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
        unchanged: Callable[[], object] = lambda: None,
    ) -> None:
        if settings.threads is not None:
            # Not only where a model is loaded: what is computed from answers that are known already (decompositions)
            # would have other bits in a build that goes on than in one that was never stopped.
            torch.set_num_threads(settings.threads)
        self._directory = directory
        self.original = Weights(weights_key(fingerprint.digest, {}))
        self._entry = entry
        self._settings = settings
        self._log = log
        self._evaluated = evaluated
        self._unchanged = unchanged
        self.suite = load_tasks(entry, settings, cache_directory)
        self.contexts = {split: _context(self.suite, split, settings) for split in SPLITS}
        self.resident: Resident | None = None
        self.evaluations = 0

    def evaluate(self, split: Split, weights: Weights) -> Evaluation:
        """Score `weights` on a split, or find the score in the log.

        Raises EvaluationError where the model cannot be loaded, a replacement does not fit it, or the original
        answers with NaN (changed weights that do are scored: such answers are wrong).
        """
        context = self.contexts[split]
        return self._log.get(weights.key, context) or self._made(context, split, weights)

    def judged(self, split: Split, weights: Weights, accepts: Accepts) -> Evaluation | None:
        """As `evaluate`, but None as soon as it is certain that `accepts` refuses the scores; what is certain then is
        in the log too."""
        context = self.contexts[split]
        if whole := self._log.get(weights.key, context):
            return whole
        known = self._log.get(weights.key, _at_most(context))
        if known is not None and not accepts(best(self.suite, known.scores)):
            return None
        original = self.evaluate(split, self.original)
        try:
            return self._made(context, split, weights, watch=Watch(self.suite, split, original, accepts))
        except AbandonedError:
            return None

    def noise_floor(self, split: Split, tolerance: Scores | None = None) -> Scores:
        """By task, how far the original's score moves when it is computed in batches of half the size: what a budget,
        and the `tolerance` of a search, must exceed to mean anything.

        Raises EvaluationError where a task's does not, or as `evaluate` does.
        """
        # Other batches first: the states that are kept are then those of the batches that the search uses.
        context = digest_of([self.contexts[split], "half the batch"])
        other = self._log.get(self.original.key, context) or self._made(context, split, self.original, halved=True)
        usual = self.evaluate(split, self.original)
        floor = {task: abs(usual.scores[task] - other.scores[task]) for task in usual.scores}
        for task in self._entry.tasks:
            limits = {"budget": task.budget, "search tolerance": (tolerance or {}).get(task.task, task.budget)}
            for limit, value in limits.items():
                if value <= floor[task.task]:
                    raise EvaluationError(
                        f"the {limit} of {value:g} for task {task.task!r} is no larger than what floating-point noise "
                        f"moves its score: {floor[task.task]:g}",
                        model=self._entry.name,
                        remedy=f"give a larger {limit}, more questions, or score in float32",
                    )
        return floor

    def _made(
        self, context: str, split: Split, weights: Weights, *, halved: bool = False, watch: Watch | None = None
    ) -> Evaluation:
        """A fresh evaluation, which is in the log then. Raises AbandonedError where `watch` ends it: then what the
        scores are at most is in the log."""
        started = time.monotonic()
        self._loaded().hold(weights.tensors, weights.read)
        try:
            tasks = self._loaded().answers(self.suite, split, halved=halved, watch=watch)
        except AbandonedError as abandoned:
            self._keep(weights, _at_most(context), split, abandoned.at_most, started)
            raise
        if not weights.tensors:
            self._require_answers(split)
        return self._keep(weights, context, split, tasks, started)

    def _keep(
        self, weights: Weights, context: str, split: Split, tasks: dict[str, TaskResult], started: float
    ) -> Evaluation:
        """Log and count what was computed since `started`, in seconds of the monotonic clock."""
        evaluation = Evaluation(weights=weights.key, context=context, split=split, tasks=tasks)
        self._log.add(evaluation)
        self.evaluations += 1
        self._evaluated(time.monotonic() - started)
        return evaluation

    def originals(self) -> Resident:
        """The model in memory, holding its own weights."""
        self._loaded().hold({}, _nothing)
        return self._loaded()

    def release(self) -> None:
        """Let go of the model in memory; what needs it next loads it again."""
        self.resident = None

    def _loaded(self) -> Resident:
        if self.resident is None:
            loaded = Resident(self._directory, self._entry.name, self._settings)
            self._unchanged()
            self.resident = loaded
        return self.resident

    def _require_answers(self, split: Split) -> None:
        """A baseline of wrong answers would let every merge pass."""
        for task in self.suite.tasks:
            if nans := task.nan_answers(split):
                raise EvaluationError(
                    f"the original answers {nans} questions of task {task.name!r} with NaN",
                    model=self._entry.name,
                    file=str(self._directory),
                    remedy=f"score in another dtype than {dtype_of(self._settings)}, or check the weights",
                )


def score_directory(
    directory: Path, entry: ModelEntry, settings: EvaluationSettings, split: Split, cache_directory: Path
) -> dict[str, TaskResult]:
    """What stock transformers makes of the files in `directory`; nothing is logged or looked up."""
    resident = Resident(directory, entry.name, settings)
    return resident.answers(load_tasks(entry, settings, cache_directory), split)


def _at_most(context: str) -> str:
    """The context of upper bounds of the scores in `context`."""
    return digest_of([context, "at most"])


def _context(suite: Suite, split: Split, settings: EvaluationSettings) -> str:
    """Everything besides the weights that decides a score."""
    return digest_of(
        {
            "tasks": [[task.name, task.metric, task.filter, task.identity] for task in suite.tasks],
            "split": split,
            **conditions(settings),
        }
    )
