"""What each stage costs at most, from headers alone. The forecast of a build and the check of the disk add these up."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import astuple, dataclass
from operator import add

from sandhi_core.pools.pool import Pool
from sandhi_core.records import Fingerprint, Slot, TensorInfo
from sandhi_core.rungs.choice import AVERAGES
from sandhi_core.rungs.grams import BLOCK
from sandhi_core.rungs.ladder import MOST_SCORES

INPUT_PASSES = 2
"""Over the profile split, of a model whose moments fit 2 GiB; larger ones take more."""

GRADIENT_PASSES = 4
"""Likewise, for how much answers depend on outputs: a backward pass takes about as long as two forward ones."""

USE_PASSES = 2
"""Likewise, to see what norms and embeddings act on, where these may be shared."""


@dataclass(frozen=True)
class Cost:
    """Upper bounds. `evaluations` counts scorings of one model on one split, `decompositions` those of one matrix."""

    evaluations: int = 0
    decompositions: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*map(add, astuple(self), astuple(other)))


class Costs:
    """Those of the stages of one pool, whose models hold what `fingerprints` say. `grouped`: models whose groups are
    formed in the same build, which makes some of what their ladders need."""

    def __init__(self, pool: Pool, fingerprints: Mapping[str, Fingerprint], grouped: Collection[str] = ()) -> None:
        self._pool = pool
        self._ladder = pool.search.strategy == "ladder"
        self._fingerprints = fingerprints
        self._weighed = set(grouped) if pool.merging.weighs else set[str]()
        self._compared = set(grouped) if pool.merging.compares else set[str]()
        self._shared = met(fingerprints.values())
        places = {slot for slots in self._shared.values() for slot in slots}
        self._places = {m: [s for s in f.slots if s in places] for m, f in fingerprints.items()}
        self._beside = met_beside(fingerprints) if pool.grouping.besides else set[str]()

    def of(self, stage: str, models: Collection[str]) -> Cost:
        """That of one stage for some of the models (of `groups`: the members of one partition)."""
        if stage == "groups":
            return self._groups(models)
        one: Callable[[str], Cost] | None = {
            "checkpoint": self._checkpoint,
            "profile": self._profile,
            "trajectory": self._trajectory,
            "holdout": self._holdout,
            "merged_weights": self._merged_weights,
            "sharing_proof": self._sharing_proof,
        }.get(stage)
        return Cost() if one is None else total(map(one, models))

    def _checkpoint(self, model: str) -> Cost:
        return Cost(bytes_read=self._fingerprints[model].nbytes)

    def _profile(self, model: str) -> Cost:
        found, profile = self._fingerprints[model], self._pool.profile
        noised = 2 * found.layers * len(profile.seeds) if profile.noise else 0
        return Cost(evaluations=1 + noised, bytes_read=found.nbytes)

    def _groups(self, models: Collection[str]) -> Cost:
        """Methods that need moments have them collected; several are compared by decomposing every difference."""
        merging, wanted = self._pool.merging, [self._fingerprints[m] for m in models]
        sets = list(met(wanted).values())
        tried = [tensors_tried(len(slots), self._pool) for slots in sets]
        cost = Cost(
            decompositions=sum(len(s) * n for s, n in zip(sets, tried, strict=True)) if merging.compares else 0,
            bytes_read=sum(s.nbytes for slots in sets for s in slots),
            bytes_written=sum(s[0].nbytes * n for s, n in zip(sets, tried, strict=True)),
        )
        if merging.weighs:
            cost += Cost(
                evaluations=len(wanted) * (self._passes if merging.compares else INPUT_PASSES),
                bytes_read=sum(f.nbytes for f in wanted),
                bytes_written=sum(moments(f) + (spectra(f) if merging.compares else 0) for f in wanted),
            )
        return cost + (self._besides(wanted) if self._pool.grouping.besides else Cost())

    def _besides(self, wanted: Collection[Fingerprint]) -> Cost:
        """Each is shared as its mean."""
        found = besides_met(wanted)
        return Cost(
            bytes_read=sum(t.nbytes for alike in found for t in alike),
            bytes_written=sum(alike[0].nbytes for alike in found),
        )

    def _trajectory(self, model: str) -> Cost:
        """A baseline is scored twice, for the noise floor. Groups that compared methods have decomposed what a ladder
        needs, without scaled rows."""
        found = self._fingerprints[model]
        cost = Cost(evaluations=2 + self._tried(model), bytes_read=found.nbytes)
        if not self._ladder:
            return cost
        times = (model not in self._compared) + (self._pool.merging.affine == "rows")
        return cost + Cost(
            evaluations=self._passes + (USE_PASSES if self._pool.grouping.besides else 0),
            decompositions=times * len(self._places[model]),
            bytes_written=times * spectra(found) + (0 if model in self._weighed else moments(found)),
        )

    def _holdout(self, model: str) -> Cost:
        walked = self._tried(model) if self._ladder else self._steps(model)
        return Cost(evaluations=1 + walked, bytes_read=self._fingerprints[model].nbytes)

    def _merged_weights(self, model: str) -> Cost:
        nbytes = self._fingerprints[model].nbytes
        return Cost(bytes_read=nbytes, bytes_written=nbytes)

    def _sharing_proof(self, model: str) -> Cost:
        """Every export is scored once more, and read for its digests."""
        return Cost(evaluations=1, bytes_read=2 * self._fingerprints[model].nbytes)

    @property
    def _passes(self) -> int:
        """Over the profile split, to weigh errors."""
        return INPUT_PASSES + (GRADIENT_PASSES if self._pool.search.errors == "answers" else 0)

    def _steps(self, model: str) -> int:
        """A component is walked where at least one of its projections has a partner."""
        return len({(slot.component, slot.layer) for slot in self._places[model]})

    def _tried(self, model: str) -> int:
        """A gallop may pay twice for a step that it rejects."""
        steps = self._steps(model)
        if self._ladder:
            return MOST_SCORES if steps or model in self._beside else 0
        return steps * (2 if self._pool.search.stride == "gallop" else 1)


def total(costs: Iterable[Cost]) -> Cost:
    return sum(costs, Cost())


def met(fingerprints: Iterable[Fingerprint]) -> dict[tuple[str, int], list[Slot]]:
    """By key and layer the slots that could share one tensor; two at least."""
    found: dict[tuple[str, int], list[Slot]] = defaultdict(list)
    for fingerprint in fingerprints:
        for slot in fingerprint.slots:
            found[slot.key, slot.layer].append(slot)
    return {place: slots for place, slots in found.items() if len(slots) > 1}


def besides_met(fingerprints: Iterable[Fingerprint]) -> list[list[TensorInfo]]:
    """Likewise of tensors that are no projections: at most all with one name and shape."""
    return [[tensor for _, tensor in alike] for alike in _alike_beside(fingerprints)]


def met_beside(fingerprints: Mapping[str, Fingerprint]) -> set[str]:
    """The models that have such a tensor."""
    return {model for alike in _alike_beside(fingerprints.values()) for model, _ in alike}


def _alike_beside(fingerprints: Iterable[Fingerprint]) -> list[list[tuple[str, TensorInfo]]]:
    found: dict[tuple[object, ...], list[tuple[str, TensorInfo]]] = defaultdict(list)
    for fingerprint in fingerprints:
        never = {slot.tensor for slot in fingerprint.slots} | set(fingerprint.private)
        for t in fingerprint.tensors:
            if t.name not in never:
                found[t.name, t.shape, t.dtype].append((fingerprint.model, t))
    return [alike for alike in found.values() if len(alike) > 1]


def tensors_tried(members: int, pool: Pool) -> int:
    """Shared tensors that a group of so many members makes, at most: one a method, and of averages one for every
    contributor left out."""
    methods = pool.merging.methods
    averages = sum(method in AVERAGES for method in methods) if pool.merging.reform else 0
    return len(methods) + averages * max(members - 2, 0)


def spectra(fingerprint: Fingerprint) -> int:
    """Bytes of a model's decomposed differences, at most."""
    return sum(slot.nbytes for slot in fingerprint.slots)


def moments(fingerprint: Fingerprint) -> int:
    """Bytes of the moments of a model's inputs."""
    shapes = {t.name: t.shape for t in fingerprint.tensors}
    widths = (shapes[s.tensor][1] for s in fingerprint.slots if s.projection not in ("k", "v", "up"))
    return sum(4 * width * min(width, BLOCK) for width in widths)
