"""What building a pool would cost at most, from headers alone: evaluations, bytes read, bytes written."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from sandhi_core.graph import Catalogue, Node
from sandhi_core.pool import Pool
from sandhi_core.records import Fingerprint, Record, Slot
from sandhi_core.rungs.choice import AVERAGES
from sandhi_core.rungs.ladder import MOST_SCORES

# How often a stage reads the whole checkpoint of a model it is about.
READS = {
    "checkpoint": 1,
    "profile": 1,
    "trajectory": 1,
    "holdout": 1,
    "merged_weights": 1,
    "sharing_proof": 2,
}


INPUT_PASSES = 2
"""Over the profile split, of a model whose moments fit 2 GiB; larger ones take more."""


USE_PASSES = 2
"""Likewise, to see what norms and embeddings act on, where these may be shared."""


class CompatibleModels(Record):
    """One partition of the `groups` stage: `sets` is how many sets of same-layer slots could share a tensor."""

    key: str
    models: tuple[str, ...]
    sets: int
    nbytes: int  # of one tensor a set: what sharing everything would keep once


class Excluded(Record):
    """Slots of one model that no other model's slots agree with."""

    model: str
    slots: int
    reason: str


class Forecast(Record):
    """Upper bounds. `evaluations` counts scorings of one model on one split, `decompositions` singular value
    decompositions of one matrix."""

    evaluations: int
    decompositions: int
    bytes_read: int
    bytes_written: int
    groups: tuple[CompatibleModels, ...]
    excluded: tuple[Excluded, ...]


def forecast(
    catalogue: Catalogue, pool: Pool, fingerprints: Mapping[str, Fingerprint], stale: Collection[Node]
) -> Forecast:
    """The cost of running the `stale` nodes of one pool, given what its models hold."""
    partners: dict[tuple[str, int], list[Slot]] = defaultdict(list)
    for fingerprint in fingerprints.values():
        for slot in fingerprint.slots:
            partners[slot.key, slot.layer].append(slot)
    shared = {place: slots for place, slots in partners.items() if len(slots) > 1}
    beside = shared_beside(fingerprints) if pool.grouping.besides else {}
    # A component is walked where at least one of its projections has a partner; a ladder asks whether there is any.
    steps = {
        m: len({(s.component, s.layer) for s in f.slots if (s.key, s.layer) in shared} or beside.get(m, ()))
        for m, f in fingerprints.items()
    }
    places = {m: sum((s.key, s.layer) in shared for s in f.slots) for m, f in fingerprints.items()}
    merging, ladder = pool.merging, pool.search.strategy == "ladder"
    grouped = merging.compares and any(
        stage == "groups" for stage, _ in stale
    )  # which decomposes what ladders need, without scaled rows
    evaluations = decompositions = read = written = 0
    for stage, key in stale:
        models = [m for m in _models(catalogue, pool, stage, key) if m in fingerprints]
        read += READS.get(stage, 0) * sum(fingerprints[m].nbytes for m in models)
        evaluations += sum(_evaluations(stage, steps[m], fingerprints[m].layers, pool) for m in models)
        if stage == "trajectory" and ladder:
            written += 0 if grouped else sum(ladder_bytes(fingerprints[m], pool) for m in models)
            decompositions += sum(places[m] for m in models) * ((not grouped) + (merging.affine == "rows"))
            evaluations += USE_PASSES * len(models) if pool.grouping.besides else 0
        if stage == "merged_weights":
            written += sum(fingerprints[m].nbytes for m in models)
        if stage == "groups":
            slots = [s for place in shared.values() for s in place if s.model in models]
            read += sum(s.nbytes for s in slots)
            sets = [place for place in shared.values() if place[0].model in models]
            written += sum(place[0].nbytes * tensors_tried(len(place), pool) for place in sets)
            if merging.weighs:
                evaluations += INPUT_PASSES * len(models)
                read += sum(fingerprints[m].nbytes for m in models)
                written += sum(ladder_bytes(fingerprints[m], pool) for m in models)
            if merging.compares:
                decompositions += sum(len(place) * tensors_tried(len(place), pool) for place in sets)
            if pool.grouping.besides:
                rest = [_beside(fingerprints[m]) for m in models]
                read, written = read + sum(rest), written + max(rest, default=0)
    groups = tuple(_compatible(catalogue, key, shared) for key in _group_keys(catalogue, pool))
    alone = {m: Counter(_reason(s, partners, len(fingerprints)) for s in f.slots) for m, f in fingerprints.items()}
    return Forecast(
        evaluations=evaluations,
        decompositions=decompositions,
        bytes_read=read,
        bytes_written=written,
        groups=groups,
        excluded=tuple(
            Excluded(model=m, slots=n, reason=reason)
            for m, reasons in alone.items()
            for reason, n in reasons.items()
            if reason
        ),
    )


def shared_beside(fingerprints: Mapping[str, Fingerprint]) -> dict[str, set[str]]:
    """By model, its tensors beside the projections that another model has by the same name, of one shape and dtype: at
    most these can be shared where a pool asks for it."""
    found: dict[str, set[tuple[str, tuple[int, ...], str]]] = {}
    for model, fingerprint in fingerprints.items():
        never = {slot.tensor for slot in fingerprint.slots} | set(fingerprint.private)
        found[model] = {(t.name, t.shape, t.dtype) for t in fingerprint.tensors if t.name not in never}
    met = Counter(tensor for tensors in found.values() for tensor in tensors)
    return {model: {t[0] for t in tensors if met[t] > 1} for model, tensors in found.items()}


def _group_keys(catalogue: Catalogue, pool: Pool) -> list[str]:
    return [key for key in catalogue.keys("group") if key.partition(".")[0] == pool.name]


def _models(catalogue: Catalogue, pool: Pool, stage: str, key: str) -> tuple[str, ...]:
    """The models of this pool that a node is about; none for another pool's node."""
    if stage in ("checkpoint", "profile"):
        return (key,) if any(m.name == key for m in pool.models) else ()
    pool_name, _, rest = key.partition(".")
    if pool_name != pool.name:
        return ()
    return catalogue.members(key) if stage == "groups" or not rest else (rest,)


def _evaluations(stage: str, steps: int, layers: int, pool: Pool) -> int:
    """At most this many scorings of one model. A gallop may pay twice for a step that it rejects; a trajectory scores
    its baseline twice, for the noise floor; the proof scores every export once more."""
    match stage:
        case "profile":
            return 1 + (2 * layers * len(pool.profile.seeds) if pool.profile.noise else 0)
        case "trajectory":
            # A ladder also answers the profile split again, to see what goes into every projection.
            return 2 + _tried(steps, pool) + (_passes(pool) if pool.search.strategy == "ladder" else 0)
        case "holdout":
            return 1 + (steps if pool.search.strategy == "walk" else _tried(steps, pool))
        case "sharing_proof":
            return 1
    return 0


def _passes(pool: Pool) -> int:
    """Over the profile split. A backward pass takes about as long as two forward ones."""
    return INPUT_PASSES + (4 if pool.search.errors == "answers" else 0)


def tensors_tried(members: int, pool: Pool) -> int:
    """Shared tensors that a group of so many members makes, at most: one a method, and of averages one for every
    contributor left out."""
    methods = pool.merging.methods
    averages = sum(method in AVERAGES for method in methods) if pool.merging.reform else 0
    return len(methods) + averages * max(members - 2, 0)


def ladder_bytes(fingerprint: Fingerprint, pool: Pool) -> int:
    """What a model's ladder keeps beside the records, at most: decomposed differences (with scaled rows once more), and
    moments of inputs in blocks of 4096 columns."""
    sources = (fingerprint.tensor(s.tensor).shape[1] for s in fingerprint.slots if s.projection not in ("k", "v", "up"))
    spectra = (2 if pool.merging.affine == "rows" else 1) * sum(s.nbytes for s in fingerprint.slots)
    return spectra + sum(4 * width * min(width, 4096) for width in sources)


def _beside(fingerprint: Fingerprint) -> int:
    """Bytes of a model's tensors that are no projections."""
    return fingerprint.nbytes - sum(slot.nbytes for slot in fingerprint.slots)


def _tried(steps: int, pool: Pool) -> int:
    if pool.search.strategy == "ladder":
        return MOST_SCORES if steps else 0
    return steps * (2 if pool.search.stride == "gallop" else 1)


def _compatible(catalogue: Catalogue, key: str, shared: Mapping[tuple[str, int], list[Slot]]) -> CompatibleModels:
    models = catalogue.members(key)
    sets = [slots for slots in shared.values() if slots[0].model in models]
    return CompatibleModels(key=key, models=models, sets=len(sets), nbytes=sum(s[0].nbytes for s in sets))


def _reason(slot: Slot, partners: Mapping[tuple[str, int], list[Slot]], models: int) -> str:
    if len(partners[slot.key, slot.layer]) > 1:
        return ""
    if models == 1:
        return "the pool has one model"
    return "no other model has a matrix of this shape, dtype and meaning in this layer"
