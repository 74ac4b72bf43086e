"""The recorded decisions, from the recorded scores, by `accept: reference` with `stride: 1`."""

from sandhi_core.pools.pool import SearchSettings
from tests.conformance.acceptance import drifted, replayed
from tests.conformance.recorded import RecordedRun


def test_every_decision(run: RecordedRun) -> None:
    settings = SearchSettings(accept="reference", stride=1)
    for model in run.models:
        decisions = [step.decision for step in replayed(model, settings).steps]
        assert decisions == [step.decision for step in model.trajectory.steps], model.name


def test_drift_is_what_our_own_rule_would_not_accept(run: RecordedRun) -> None:
    """Against the original's baseline (`accept: original`) no acceptance can exceed the tolerance; the reference
    lets one through only because a score accepted before had sunk the floor."""
    for model in run.models:
        floor = model.baseline
        for step in model.trajectory.steps:
            score = None if step.scores is None else step.scores[model.task]
            if step.index in drifted(model):
                assert floor < model.baseline, (model.name, step.index)
            if score is not None and step.decision == "accepted":
                floor = min(floor, score)
        ours = replayed(model, SearchSettings(accept="original", stride=1))
        accepted = {s.index for s in ours.steps if s.decision == "accepted"}
        assert not accepted & set(drifted(model)), model.name
