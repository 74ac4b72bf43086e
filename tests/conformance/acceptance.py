"""A recorded walk again: the search is given the recorded scores instead of evaluations."""

from sandhi_core.cutoffs import EPSILON
from sandhi_core.pools.pool import SearchSettings
from sandhi_core.records import Accepts, Evaluation, TaskResult, Trajectory
from sandhi_core.search import search
from tests.conformance.recorded import RecordedModel

FAILED = float("nan")  # an evaluation without a score is never accepted


def replayed(model: RecordedModel, settings: SearchSettings) -> Trajectory:
    """The walk that `settings` make of a model's plan, step by step with the recorded scores."""
    scores = iter(step.scores for step in model.trajectory.steps)

    def next_score(tensors: dict[str, str], accepts: Accepts | None) -> Evaluation:
        recorded = next(scores)
        return _evaluation(model.task, FAILED if recorded is None else recorded[model.task])

    baseline = _evaluation(model.task, model.baseline)
    return search(model.plan, settings, model.tolerance, baseline, lambda recipe: recipe.digest, next_score)


def drifted(model: RecordedModel) -> list[int]:
    """Steps that were accepted though their score is further below the original's than the threshold."""
    limit = model.baseline - model.tolerance[model.task] - EPSILON
    return [
        step.index
        for step in model.trajectory.steps
        if step.decision == "accepted" and step.scores is not None and step.scores[model.task] < limit
    ]


def _evaluation(task: str, score: float) -> Evaluation:
    result = TaskResult(value=score, higher_is_better=True, questions=())
    return Evaluation(weights="", context="", split="search", tasks={task: result})
