"""A recorded clustering of the reference: the statistics that went in, and the proposals that came out."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from sandhi_core.records import Contributor, Fingerprint, Group, Profile, Recipe, Sensitivity, Slot, TensorInfo
from tests.conformance.recorded import Row, contributors, read_rows, slug
from tests.synthetic import PROJECTIONS

Proposal = tuple[int, str, tuple[tuple[str, int], ...]]
"""(stage, projection, sorted (model, layer) pairs)."""

Block = tuple[int, str, int, frozenset[str]]
"""(stage, component, layer, projections): one step of one model."""


@dataclass(frozen=True)
class RecordedClustering:
    """`statistics` are None where only the proposals were recorded. `proposals`: by label, the rows with their
    stage in the order of the files."""

    name: str
    statistics: list[Row] | None
    proposals: dict[str, list[tuple[int, Row]]]

    @cached_property
    def fingerprints(self) -> dict[str, Fingerprint]:
        """What clustering saw of every model: only components within the gate, in the order of the rows."""
        rows: dict[str, list[Row]] = defaultdict(list)
        for row in self.statistics or ():
            rows[slug(row["model"])].append(row)
        return {model: _fingerprint(model, own) for model, own in rows.items()}

    @cached_property
    def profiles(self) -> dict[str, Profile]:
        """Profiles that let every component pass which passed the recorded gate, and no other."""
        return {model: _passed(model, f) for model, f in self.fingerprints.items()}

    def recorded(self) -> set[Proposal]:
        """Every proposal, once, whichever models' files repeat it."""
        return {
            (stage, row["component"].split("_")[1], _slugs(row))
            for rows in self.proposals.values()
            for stage, row in rows
        }

    def entered(self) -> dict[str, set[tuple[str, int]]]:
        """By model the (component, layer) pairs that are known to have been clustered."""
        found: dict[str, set[tuple[str, int]]] = defaultdict(set)
        for model, fingerprint in self.fingerprints.items():
            found[model] |= {(s.component, s.layer) for s in fingerprint.slots}
        for _, projection, parts in self.recorded():
            for model, layer in parts:
                found[model].add((PROJECTIONS[projection], layer))
        return dict(found)

    def blocks(self, label: str) -> list[Block]:
        """The order of one model's steps."""
        rows = self.proposals[label]
        found = groupby(rows, key=lambda p: (p[0], p[1]["component"].split("_")[0], int(p[1]["layer"])))
        return [
            (stage, kind, layer, frozenset(row["component"].split("_")[1] for _, row in block))
            for (stage, kind, layer), block in found
        ]

    def groups(self) -> list[Group]:
        """The recorded proposals as groups."""
        return [_group(stage, projection, parts) for stage, projection, parts in sorted(self.recorded())]


def recorded_clusterings(artifact: Path) -> Iterator[RecordedClustering]:
    """Every set of proposals, those of runs included, by path."""
    folders = {path.parent for path in artifact.glob("candidates/*/ops_step*.csv")}
    folders |= {path.parent for path in artifact.glob("runs/*/clustering/**/ops_step*.csv")}
    for folder in sorted(folders):
        statistics = folder / "prepared_stats.csv"
        proposals: dict[str, list[tuple[int, Row]]] = defaultdict(list)
        for stage in (1, 2):
            for path in sorted(folder.glob(f"ops_step{stage}_*.csv")):
                label = path.stem.removeprefix(f"ops_step{stage}_")
                proposals[label] += [(stage, row) for row in read_rows(path) if row["op"] == "merge"]
        yield RecordedClustering(
            name="/".join(folder.relative_to(artifact).parts[:2]),
            statistics=read_rows(statistics) if statistics.is_file() else None,
            proposals=dict(proposals),
        )


def _slugs(row: Row) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((slug(label), layer) for label, layer in contributors(row["models"], int(row["layer"]))))


def _slot(model: str, layer: int, projection: str, key: str) -> Slot:
    name = f"{layer}.{projection}"
    component = PROJECTIONS[projection]
    # Sizes do not enter the reference's clustering or order.
    return Slot(
        model=model,
        layer=layer,
        projection=projection,
        component=component,
        tensor=name,
        digest=f"{model} {name}",
        nbytes=1,
        key=key,
    )


def _fingerprint(model: str, rows: list[Row]) -> Fingerprint:
    slots, tensors = [], []
    for row in rows:
        slot = _slot(model, int(row["layer"]), row["component"].split("_")[1], f"{row['component']} {row['shape']}")
        slots.append(slot)
        tensors.append(
            TensorInfo(
                name=slot.tensor,
                file="",
                dtype="BF16",
                shape=(1,),
                nbytes=slot.nbytes,
                digest=slot.digest,
                mean=float(row["mean"]),
                std=float(row["std"]),
                constant_rows=0,
            )
        )
    return Fingerprint(
        model=model,
        model_type="recorded",
        layers=1 + max(s.layer for s in slots),
        dtype="BF16",
        files={},
        tensors=tuple(tensors),
        slots=tuple(slots),
        private=(),
        rows="",
    )


def _passed(model: str, fingerprint: Fingerprint) -> Profile:
    within = sorted({(s.layer, s.component) for s in fingerprint.slots})
    return Profile(
        model=model,
        fingerprint="",
        seeds=(),
        questions={},
        baseline={},
        sensitivities=tuple(Sensitivity(layer=n, component=kind, scores={}, drop=0.0) for n, kind in within),
    )


def _group(stage: int, projection: str, parts: tuple[tuple[str, int], ...]) -> Group:
    recipe = Recipe(
        projection=projection,
        shape=(1,),
        dtype="BF16",
        method="mean",
        rescale="none",
        contributors=tuple(Contributor(model=m, layer=n, tensor=f"{n}.{projection}", digest="") for m, n in parts),
    )
    members = tuple(_slot(m, n, projection, projection) for m, n in parts)
    return Group.model_validate({"recipe": recipe, "members": members, "stage": stage})
