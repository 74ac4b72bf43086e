"""How much noise in one component costs a model: where it may be merged, and in which order that is tried.

Source: SANDHI (SOSP 2026), noise profile: every projection W of a component becomes (W + Z) / 2, with the
elements of Z drawn from a normal distribution of W's own mean and standard deviation, as if W were averaged
with an unrelated matrix of the same statistics.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.cutoffs import drops_of
from sandhi_core.errors import EvaluationError
from sandhi_core.evaluation.evaluator import Evaluator, Weights, noise_key, weights_key
from sandhi_core.grouping.order import Place
from sandhi_core.pools.pool import ProfileSettings
from sandhi_core.records import Evaluation, Fingerprint, Profile, Sensitivity, Slot

CHUNK = 2**20
"""Elements of noise held at a time. The noise does not depend on it."""


def noisy(
    tensor: Tensor,
    seed: int,
    fingerprint: str,
    layer: int,
    component: str,
    projection: str,
    mean: float,
    std: float,
) -> Tensor:
    """(W + Z) / 2 in the tensor's shape and dtype, computed in fp32. `mean` and `std` are those of W's
    elements.

    Z depends on the names alone: a Philox generator keyed by their sha256, drawn in the elements' order, so
    that it is the same in whatever order, on whatever device and with however many threads components are
    profiled.
    """
    names = "\n".join([str(seed), fingerprint, str(layer), component, projection])
    key = int.from_bytes(hashlib.sha256(names.encode()).digest()[:16], "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    result = torch.empty(tensor.shape, dtype=tensor.dtype)
    source, target = tensor.reshape(-1), result.view(-1)
    for start in range(0, source.numel(), CHUNK):
        weights = source[start : start + CHUNK].float()
        noise = torch.from_numpy(generator.standard_normal(weights.numel(), dtype=np.float32))
        target[start : start + CHUNK] = noise.mul_(std).add_(mean).add_(weights).div_(2).to(tensor.dtype)
    return result


def profile(
    model: str,
    fingerprint: Fingerprint,
    checkpoint: Checkpoint,
    evaluator: Evaluator,
    settings: ProfileSettings,
) -> Profile:
    """Score every component of `model` with noise in it, on the profile split; one evaluation a component
    and seed, and one for the baseline.

    From the top layer down: what the evaluator keeps of the layers below the last change stays valid longest. Without
    `noise` there is the baseline alone.
    """
    baseline = evaluator.evaluate("profile", Weights(weights_key(fingerprint.digest, {})))
    scored: dict[Place, list[Evaluation]] = {
        place: [
            evaluator.evaluate("profile", noise_weights(fingerprint, checkpoint, seed, slots))
            for seed in settings.seeds
        ]
        for place, slots in (components(fingerprint).items() if settings.noise else ())
    }
    return Profile(
        model=model,
        fingerprint=fingerprint.digest,
        seeds=settings.seeds,
        questions={task: len(result.questions) for task, result in baseline.tasks.items()},
        baseline=baseline.scores,
        sensitivities=tuple(
            _sensitivity(place, baseline, found)
            for place, found in sorted(scored.items(), key=lambda item: (item[0][1], item[0][0]))
        ),
    )


def components(fingerprint: Fingerprint) -> dict[Place, tuple[Slot, ...]]:
    """The slots of every component, in the order in which they are profiled: from the top layer down."""
    found: dict[Place, list[Slot]] = defaultdict(list)
    for slot in fingerprint.slots:
        found[slot.component, slot.layer].append(slot)
    return {place: tuple(found[place]) for place in sorted(found, key=lambda place: (-place[1], place[0]))}


def noise_weights(fingerprint: Fingerprint, checkpoint: Checkpoint, seed: int, slots: Sequence[Slot]) -> Weights:
    """A model's weights with noise in the `slots` of one component."""
    projections = {slot.tensor: slot.projection for slot in slots}
    component, layer = slots[0].component, slots[0].layer

    def read(tensor: str) -> Tensor:
        info, names = fingerprint.tensor(tensor), (fingerprint.digest, layer, component, projections[tensor])
        found = noisy(checkpoint.tensor(tensor), seed, *names, info.mean, info.std)
        if not bool(found.isfinite().all()):
            raise EvaluationError(
                f"noise of its own size is beyond what {info.dtype} holds",
                model=fingerprint.model,
                file=info.file,
                tensor=tensor,
                remedy="this tensor's numbers are too large to average: leave the model out, or build a ladder with "
                "profile.noise: false",
            )
        return found

    key = noise_key(fingerprint.digest, seed, layer, component)
    return Weights(key, dict.fromkeys(projections, key), read)


def _sensitivity(place: Place, baseline: Evaluation, scored: Sequence[Evaluation]) -> Sensitivity:
    """Mean scores over seeds, and the largest drop of any task's mean."""
    scores = {task: fmean(e.scores[task] for e in scored) for task in baseline.tasks}
    higher_is_better = {task: result.higher_is_better for task, result in baseline.tasks.items()}
    component, layer = place
    drop = max(drops_of(baseline.scores, scores, higher_is_better).values())
    return Sensitivity(layer=layer, component=component, scores=scores, drop=drop)
