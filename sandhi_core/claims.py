"""What an export claims to save, from its manifest alone."""

from collections import defaultdict
from dataclasses import dataclass

from sandhi_core.assignment import factors_among
from sandhi_core.checkpoints.safetensors_file import PAGE
from sandhi_core.layout import shards
from sandhi_core.records import ExportedTensor, Manifest
from sandhi_core.savings import duplicates, padding_of

MEMORY_SHARE = 0.9
"""Part of the claimed bytes that processes must be seen to save."""


@dataclass(frozen=True)
class Claimed:
    """Bytes: of all checkpoints' tensors, of exact duplicates held once, of what models add to shared tensors (their
    checkpoints have none of it), of all tensors held once less what is added; and the least that processes must be seen
    to save of the latter."""

    checkpoint_bytes: int
    duplicates: int
    added: int
    claimed: int
    least_in_memory: int


def claims_of(manifest: Manifest) -> Claimed:
    """The counts of `savings` over the tensors that share a file, as the manifest has them."""
    holders: dict[tuple[str, str], list[ExportedTensor]] = defaultdict(list)
    for model in manifest.models.values():
        for name, tensor in model.tensors.items():
            if tensor.sharing != "private":
                holders[name, tensor.digest].append(tensor)
    models = manifest.models.values()
    added = sum(model.tensors[factor].nbytes for model in models for factor in factors_among(model.tensors))
    padding = padding_of(manifest.alignment)
    claimed = sum(held[0].nbytes * (len(held) - 1) - padding for held in holders.values()) - added
    owners = ([t for t in held if t.sharing == "duplicate"] for held in holders.values())
    return Claimed(
        checkpoint_bytes=sum(t.nbytes for model in models for t in model.tensors.values()) - added,
        duplicates=sum(duplicates(own[0].nbytes, len(own), padding) for own in owners if own),
        added=added,
        claimed=claimed,
        least_in_memory=least_in_memory(claimed, manifest),
    )


def least_in_memory(claimed: int, manifest: Manifest) -> int:
    """The part of `claimed` bytes that processes must save; a file's first and last page are mapped whole."""
    files = sum(len(shards(model)) for model in manifest.models.values())
    return int(MEMORY_SHARE * claimed) - 2 * PAGE * files
