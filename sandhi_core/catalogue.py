"""Pool files become a catalogue, and the catalogue with an artifact root a schedule of what is stale."""

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sandhi_core.artifacts import Artifacts
from sandhi_core.checkpoints.architecture import group_key
from sandhi_core.checkpoints.checkpoint import Checkpoint, resolve
from sandhi_core.checkpoints.survey_files import SUFFIXES
from sandhi_core.errors import PoolError, SandhiError
from sandhi_core.evaluation.conditions import conditions
from sandhi_core.evaluation.taskfiles import task_identity
from sandhi_core.graph import UNREADABLE, Catalogue, Definition, Node, Schedule, agreed, own_inputs, schedule
from sandhi_core.pools.pool import Base, ModelEntry, Pool, load_pool

Placed = Callable[[Pool], Pool]
"""The pool with the device that it is scored on. Raises PoolError where that cannot be told."""


class Usable(NamedTuple):
    """What could be read of pool files, and why the others are left out."""

    catalogue: Catalogue
    refused: tuple[PoolError, ...]


def load_catalogue(files: Iterable[Path], placed: Placed = lambda pool: pool) -> Catalogue:
    """Read pool files. Raises PoolError for a bad file, or where two pools have one name or contradict each other."""
    catalogue, refused = load_usable(files, placed)
    if refused:
        raise refused[0]
    return catalogue


def load_usable(files: Iterable[Path], placed: Placed = lambda pool: pool) -> Usable:
    """Read pool files, of which a bad one, or one that contradicts another before it, holds up nobody else's pool."""
    pools: dict[str, Pool] = {}
    definitions: dict[str, Definition] = {}
    refused: list[PoolError] = []
    for file in sorted(files):
        try:
            pool = placed(load_pool(file))
            if pool.name in pools:
                raise PoolError(
                    f"two pool files define a pool named {pool.name!r}",
                    file=str(file),
                    remedy="rename one of them",
                )
            definitions = agreed(pool, definitions)
        except PoolError as error:
            refused.append(error)
        else:
            pools[pool.name] = pool
    entries = {entry.name: entry for pool in pools.values() for entry in pool.models}
    return Usable(Catalogue(pools, {name: _group_of(entry) for name, entry in entries.items()}), tuple(refused))


def _group_of(entry: ModelEntry) -> str:
    """The group's part of a partition key, from configuration and headers alone."""
    try:
        checkpoint = Checkpoint.open(resolve(entry), entry.name)
        dtypes = [checkpoint.header(name).dtype for name in checkpoint.names]
        return group_key(checkpoint.config, max(sorted(set(dtypes)), key=dtypes.count))
    except SandhiError:
        # The graph must load all the same; the `checkpoint` stage of this model reports what is wrong.
        return UNREADABLE


def checkpoint_identity(entry: ModelEntry | Base) -> Any:
    """Names, sizes and times of a checkpoint's files: cheap, and different whenever a file was written."""
    try:
        return Checkpoint.open(resolve(entry), entry.name).identity()
    except SandhiError as error:
        return {"unreadable": error.problem.message}


def weight_bytes(entry: ModelEntry | Base) -> int:
    """Bytes of a checkpoint's weight files; 0 of one that is not there."""
    try:
        files = [f for suffix in SUFFIXES.values() for f in resolve(entry).glob(f"*{suffix}")]
        return sum(file.stat().st_size for file in files)
    except (SandhiError, OSError):  # reported with the model
        return 0


def scoring(pool: Pool, entry: ModelEntry) -> Any:
    """What decides a model's scores besides its weights: the contents of its tasks, metrics, conditions."""
    include = pool.evaluation.include_path
    try:
        tasks = [[task_identity(Path(include) if include else None, t.task), t.metric] for t in entry.tasks]
    except SandhiError as error:
        return {"unreadable": error.problem.message}
    return {"tasks": tasks, "conditions": conditions(pool.evaluation)}


class Planner:
    """What is stale in `artifacts` for `catalogue`. Files are looked at once per planner: make a new one to look
    again."""

    def __init__(self, catalogue: Catalogue, artifacts: Artifacts) -> None:
        self.catalogue = catalogue
        self.artifacts = artifacts
        self.graph = catalogue.graph()
        self._identity = cache(checkpoint_identity)
        self._scoring = cache(scoring)

    def own(self, node: Node) -> Any:
        return own_inputs(self.catalogue, node, lambda _, entry: self._identity(entry), self._scoring)

    def schedule(self, forced: frozenset[Node] = frozenset()) -> Schedule:
        return schedule(self.graph, self.own, self.artifacts.stored, forced)
