"""Which slots of one compatibility key the reference would merge: Ward clusters of (mean, std).

Source: SANDHI (SOSP 2026), clustering, as its artifact does it (`prepared_stats.csv` to `ops_step*.csv`):
Ward linkage (Ward, 1963) on (mean, std), z-scored within each model, cut into k = round(rows / models) clusters.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist

Array = npt.NDArray[np.float64]


class Point(NamedTuple):
    """One slot as the clustering sees it: element-wise mean and standard deviation of its weights."""

    model: str
    layer: int
    mean: float
    std: float


@dataclass(frozen=True)
class Clustered:
    """Sets of row numbers. `same_layer`: stage 1. `across`: stage 2, at most one row a model, layers free."""

    same_layer: tuple[tuple[int, ...], ...]
    across: tuple[tuple[int, ...], ...]


def standardised(points: Sequence[Point]) -> list[Point]:
    """(mean, std) as z-scores over all `points` of the same model, whatever their projections (sample standard
    deviation); where a model's all agree, zero. So models of other scales can be compared."""
    values = _values(points)
    rows: dict[str, list[int]] = defaultdict(list)
    for row, point in enumerate(points):
        rows[point.model].append(row)
    for own in rows.values():
        spread = values[own].std(axis=0, ddof=1) if len(own) > 1 else np.zeros(2)
        values[own] = (values[own] - values[own].mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    return [p._replace(mean=float(m), std=float(s)) for p, (m, s) in zip(points, values, strict=True)]


def ward_groups(points: Sequence[Point]) -> Clustered:
    """The reference's groups among `points`, all of one key. Their order decides ties and which leftover is
    placed first, as in the reference; distances to centroids are taken in the coordinates given.

    Stage 1: in every cluster, rows of one layer that are of two models or more. The cluster's other rows
    are placed with the nearest of those that lacks their model. Stage 2 clusters again what stage 1 did not
    settle: sets that were given such a row, and rows that found no set. Where there is at most a row a
    model, the reference goes straight to stage 2.
    """
    values = _values(points)
    models = [p.model for p in points]
    first = range(len(points)) if len(points) > len(set(models)) else range(0)
    same_layer: list[tuple[int, ...]] = []
    spanning: set[int] = set()
    placed: set[int] = set()
    for cluster in _clusters(values, models, first):
        for core, full in _around_layers(points, values, cluster):
            same_layer.append(core)
            placed.update(full)
            if len(full) > len(core):
                spanning.update(full)
    unplaced = [i for i in range(len(points)) if i not in placed]
    return Clustered(tuple(same_layer), tuple(_across(values, models, [*sorted(spanning), *unplaced])))


def _values(points: Iterable[Point]) -> Array:
    return np.array([(p.mean, p.std) for p in points], dtype=np.float64).reshape(-1, 2)


def _clusters(values: Array, models: Sequence[str], rows: Sequence[int]) -> list[list[int]]:
    """Ward clusters of `rows`, by label."""
    if len(rows) < 2:
        return [list(rows)] if rows else []
    chosen = values[list(rows)]
    normed = (chosen - chosen.mean(axis=0)) / (chosen.std(axis=0) + 1e-12)
    k = max(1, round(len(rows) / len({models[i] for i in rows})))
    labels = fcluster(linkage(pdist(normed), method="ward"), t=k, criterion="maxclust")
    members: dict[int, list[int]] = defaultdict(list)
    for row, label in zip(rows, labels, strict=True):
        members[int(label)].append(row)
    return [members[label] for label in sorted(members)]


def _around_layers(
    points: Sequence[Point], values: Array, cluster: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Per layer that two models or more have in `cluster`: its rows, and the same with the leftovers
    placed."""
    layers: dict[int, list[int]] = defaultdict(list)
    for row in cluster:
        layers[points[row].layer].append(row)
    cores = [tuple(rows) for _, rows in sorted(layers.items()) if len({points[i].model for i in rows}) > 1]
    full = [list(core) for core in cores]
    centres = [values[list(core)].mean(axis=0) for core in cores]
    for row in sorted(set(cluster) - {i for core in cores for i in core}):
        model = points[row].model
        open_to = [g for g, rows in enumerate(full) if model not in {points[i].model for i in rows}]
        if open_to:
            nearest = min(open_to, key=lambda g: float(((values[row] - centres[g]) ** 2).sum()))
            full[nearest].append(row)
            centres[nearest] += (values[row] - centres[nearest]) / len(full[nearest])
    return [(core, tuple(rows)) for core, rows in zip(cores, full, strict=True)]


def _across(values: Array, models: Sequence[str], rows: Sequence[int]) -> list[tuple[int, ...]]:
    """Stage 2: of every cluster each model's row that is nearest to the centroid, where that makes two or
    more."""
    groups = []
    for cluster in _clusters(values, models, rows):
        distance = ((values[cluster] - values[cluster].mean(axis=0)) ** 2).sum(axis=1)
        nearest: dict[str, int] = {}
        for at in np.argsort(distance, kind="stable"):
            nearest.setdefault(models[cluster[at]], cluster[at])
        if len(nearest) > 1:
            groups.append(tuple(nearest[model] for model in sorted(nearest)))
    return groups
