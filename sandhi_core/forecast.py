"""What building a pool would cost at most, from headers alone: evaluations, bytes read, bytes written."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict

from sandhi_core.artifacts import Artifacts
from sandhi_core.costs import Cost, Costs, met, total
from sandhi_core.graph import STAGES, Catalogue, Node
from sandhi_core.pools.pool import Pool
from sandhi_core.records import Fingerprint, Record, Slot


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
    catalogue: Catalogue, pool: Pool, fingerprints: Mapping[str, Fingerprint], each: Iterable[Cost]
) -> Forecast:
    """What stale nodes of one pool cost together, `each` as `costs` has it, and what its models could share."""
    shared = met(fingerprints.values())
    groups = tuple(_compatible(catalogue, key, shared) for key in _group_keys(catalogue, pool))
    reason = "no other model has a matrix of this shape, dtype and meaning in this layer"
    if len(fingerprints) == 1:
        reason = "the pool has one model"
    alone = Counter(s.model for f in fingerprints.values() for s in f.slots if (s.key, s.layer) not in shared)
    return Forecast(
        **asdict(total(each)),
        groups=groups,
        excluded=tuple(Excluded(model=model, slots=slots, reason=reason) for model, slots in alone.items()),
    )


def costs(
    catalogue: Catalogue, pool: Pool, fingerprints: Mapping[str, Fingerprint], stale: Collection[Node]
) -> dict[Node, Cost]:
    """That of each `stale` node by itself, of another pool's nothing."""
    about = {node: [m for m in _models(catalogue, pool, *node) if m in fingerprints] for node in stale}
    grouped = {model for (stage, _), models in about.items() if stage == "groups" for model in models}
    of = Costs(pool, fingerprints, grouped).of
    return {(stage, key): of(stage, models) for (stage, key), models in about.items()}


def bound(catalogue: Catalogue, artifacts: Artifacts, node: Node) -> int:
    """How many evaluations a node makes at most, as far as the checkpoints that it depends on have been read."""
    stage, key = node
    pool = catalogue.entry(key)[0] if STAGES[stage].scope == "model" else catalogue.pools[key.partition(".")[0]]
    about = _models(catalogue, pool, stage, key)
    if STAGES[stage].scope == "member":
        about = catalogue.members(f"{pool.name}.{catalogue.group_of[about[0]]}")  # whom it may share with
    read = [model for model in about if artifacts.envelope(("checkpoint", model)) is not None]
    fingerprints = {model: artifacts.load(Fingerprint, "checkpoint", model) for model in read}
    return costs(catalogue, pool, fingerprints, [node])[node].evaluations


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


def _compatible(catalogue: Catalogue, key: str, shared: Mapping[tuple[str, int], list[Slot]]) -> CompatibleModels:
    models = catalogue.members(key)
    sets = [slots for slots in shared.values() if slots[0].model in models]
    return CompatibleModels(key=key, models=models, sets=len(sets), nbytes=sum(s[0].nbytes for s in sets))
