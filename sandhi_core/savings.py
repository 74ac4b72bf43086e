"""Bytes that a pool saves: counted on distinct tensors, exact duplicates apart, net of corrections."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sandhi_core.assignment import Assignment
from sandhi_core.records import Fingerprint, Savings, TensorInfo

MIN_SHARED_BYTES = 4096
"""Exact duplicates below one page are not worth a shared shard: they stay private and are not claimed. Nor are vectors
(norms, biases), merged or not: a file of its own would take more pages than its bytes."""


PAGE_ALIGNED = 4096
"""Bytes to a multiple of which the tensor in a shared file begins, unless a pool asks for more."""


def padding_of(alignment: int) -> int:
    """Bytes that a shared file has before its tensor, as they are counted: a page of header is not."""
    return alignment if alignment > PAGE_ALIGNED else 0


@dataclass(frozen=True)
class Holding:
    """One distinct tensor under one name. `merged` models hold it instead of their own; `owners` own it. `padding`:
    bytes that it takes to keep it in a file of its own."""

    name: str
    digest: str
    nbytes: int
    merged: tuple[str, ...]
    owners: tuple[str, ...]
    vector: bool = False
    padding: int = 0

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted(self.merged + self.owners))

    @property
    def shared(self) -> bool:
        """Whether one copy serves all of `models`. One that only owners hold is an exact duplicate."""
        worth = worth_a_file(self.nbytes, self.vector, bool(self.merged))
        return len(self.models) > 1 and worth and self.freed > 0

    @property
    def freed(self) -> int:
        """Bytes that one copy for all spares."""
        return self.nbytes * (len(self.models) - 1) - self.padding

    @property
    def duplicates(self) -> int:
        """Bytes that one copy for its owners alone would spare."""
        return duplicates(self.nbytes, len(self.owners), self.padding)


def duplicates(nbytes: int, owners: int, padding: int) -> int:
    """Bytes that one copy spares where so many models have the same tensor from the start."""
    return max(nbytes * (owners - 1) - padding, 0)


def worth_a_file(nbytes: int, vector: bool, merged: bool = True) -> bool:
    """Whether a tensor of several models is kept in a file of its own, once; else each keeps a copy, and nothing is
    saved."""
    return nbytes >= MIN_SHARED_BYTES or (merged and not vector)


def holdings(
    assignments: Mapping[str, Assignment], fingerprints: Mapping[str, Fingerprint], alignment: int = PAGE_ALIGNED
) -> tuple[Holding, ...]:
    """Every distinct (name, digest) of the pool with who holds it, sorted. `alignment`: of shared files, in bytes.

    Only equal names count as one tensor: an index that names shards can express nothing else (docs/format.md).
    What a model adds to a shared tensor is its own and no holding.
    """
    merged: dict[tuple[str, str], list[str]] = defaultdict(list)
    owners: dict[tuple[str, str], list[str]] = defaultdict(list)
    infos: dict[tuple[str, str], TensorInfo] = {}
    for model in sorted(fingerprints):
        assigned = assignments.get(model, Assignment()).tensors
        for tensor in fingerprints[model].tensors:
            key = (tensor.name, assigned.get(tensor.name, tensor.digest))
            (merged if tensor.name in assigned else owners)[key].append(model)
            infos[key] = tensor
    return tuple(
        Holding(
            *key,
            nbytes=infos[key].nbytes,
            merged=tuple(merged[key]),
            owners=tuple(owners[key]),
            vector=len(infos[key].shape) == 1,
            padding=padding_of(alignment),
        )
        for key in sorted(infos)
    )


def savings(
    assignments: Mapping[str, Assignment], fingerprints: Mapping[str, Fingerprint], alignment: int = PAGE_ALIGNED
) -> Savings:
    """Bytes that a pool saves when each model holds its assignment and otherwise its own tensors, in files of this
    `alignment` in bytes."""
    shared = [h for h in holdings(assignments, fingerprints, alignment) if h.shared]
    total = sum(f.nbytes for f in fingerprints.values())
    return Savings(
        checkpoint_bytes=total,
        resident_bytes=total - sum(_tied_copies(f) for f in fingerprints.values()),
        duplicates=sum(h.duplicates for h in shared),
        freed=sum(h.freed for h in shared),
        overhead=sum(assignment.overhead for assignment in assignments.values()),
    )


def _tied_copies(fingerprint: Fingerprint) -> int:
    """Bytes of an output head that repeats the embedding: servers keep the two as one."""

    def named(suffix: str) -> TensorInfo | None:
        return next((t for t in fingerprint.tensors if t.name.endswith(suffix)), None)

    head, embedding = named("lm_head.weight"), named("embed_tokens.weight")
    tied = head is not None and embedding is not None and head.digest == embedding.digest
    return head.nbytes if tied and head is not None else 0
