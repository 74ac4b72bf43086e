"""What one model holds in place of its own matrices, at one place of its trajectory."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sandhi_core.records import Adjustment, Trajectory, digest_of


@dataclass(frozen=True)
class Assignment:
    """`tensors`: tensor name to the digest of the shared tensor that the model holds there; everything else is the
    model's own. `adjustments`: what it adds to some of these."""

    tensors: Mapping[str, str] = field(default_factory=dict)
    adjustments: Mapping[str, Adjustment] = field(default_factory=dict)

    @property
    def overhead(self) -> int:
        """Bytes of the adjustments."""
        return sum(adjustment.nbytes for adjustment in self.adjustments.values())

    @property
    def identities(self) -> dict[str, str]:
        """By tensor name what names the matrix that the model acts with there."""
        return {
            name: digest_of([digest, self.adjustments[name].digest]) if name in self.adjustments else digest
            for name, digest in self.tensors.items()
        }


def assignment_at(trajectory: Trajectory, steps: int) -> Assignment:
    """After the first `steps` steps; of two accepted writes to a tensor the later wins."""
    tensors: dict[str, str] = {}
    adjustments: dict[str, Adjustment] = {}
    for step in trajectory.steps[:steps]:
        if step.decision == "accepted":
            for name, digest in step.tensors.items():
                tensors[name] = digest
                adjustments.pop(name, None)
                if name in step.adjustments:
                    adjustments[name] = step.adjustments[name]
    return Assignment(tensors, adjustments)


def factor_names(tensor: str) -> tuple[str, str]:
    """What PEFT calls the factors A (`down`) and B (`up`) of a linear layer's weight, by the name of that."""
    layer = tensor.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def vector_names(tensor: str) -> tuple[str, str]:
    """What an export calls the scale and the shift of a linear layer's rows, by the name of its weight."""
    layer = tensor.removesuffix(".weight")
    return f"{layer}.row_scale", f"{layer}.row_shift"


def parts_of(tensor: str, added: Adjustment) -> dict[str, str]:
    """What is added to a tensor: the names of its factors and vectors, each with its digest."""
    names = (*factor_names(tensor), *vector_names(tensor))
    digests = (added.down, added.up, added.scale, added.shift)
    return {name: digest for name, digest in zip(names, digests, strict=True) if digest}


def is_factor(tensor: str) -> bool:
    """Whether a tensor has a name that PEFT or an export gives a factor or a vector, whatever it goes with."""
    return ".lora_A." in tensor or ".lora_B." in tensor or tensor.endswith((".row_scale", ".row_shift"))


def factors_among(names: Collection[str]) -> dict[str, str]:
    """The factors and vectors among a model's tensors, each with the name of the weight that it goes with. No
    checkpoint that enters a pool has such names of its own: every tensor of it is accounted for (architecture.py)."""
    return {part: name for name in names for part in (*factor_names(name), *vector_names(name)) if part in names}
