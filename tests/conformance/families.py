"""Sizes of the recorded models, by family: bytes of every projection in bf16, and of the whole checkpoint."""

import re
from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20


@dataclass(frozen=True)
class Family:
    """Shapes are (rows, columns) as in the checkpoint; `checkpoint_mib` is what the reference measured on disk."""

    hidden: int
    queries: int  # rows of q
    keys: int  # rows of k and of v
    intermediate: int
    checkpoint_mib: float
    layers: int

    def shape(self, projection: str) -> tuple[int, int]:
        return {
            "q": (self.queries, self.hidden),
            "k": (self.keys, self.hidden),
            "v": (self.keys, self.hidden),
            "o": (self.hidden, self.queries),
            "gate": (self.intermediate, self.hidden),
            "up": (self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }[projection]

    @property
    def checkpoint_bytes(self) -> int:
        return round(self.checkpoint_mib * MIB)


Name = Literal["llama-8b", "deepseek-7b", "qwen2.5-7b", "qwen3-32b"]

FAMILIES: dict[Name, Family] = {
    "llama-8b": Family(4096, 4096, 1024, 14336, 15316.5, 32),
    "deepseek-7b": Family(4096, 4096, 4096, 11008, 13180.5, 30),
    "qwen2.5-7b": Family(3584, 3584, 512, 18944, 14525.6, 28),
    "qwen3-32b": Family(5120, 8192, 1024, 25600, 62493.5, 64),
}

# A fine-tune's name seldom says its base; first match counts.
_NAMES: tuple[tuple[str, Name], ...] = (
    (r"32b|qwen-?3|medgo|t-pro|light-if|gazal|ruadapt", "qwen3-32b"),
    (r"deepseek", "deepseek-7b"),
    (r"qwen-?2\.5|qwen", "qwen2.5-7b"),
    (r"llama|calme|legalkit|hawkish|medical|safetyguard|truth", "llama-8b"),
)


def family_of(label: str, layers: int | None) -> Family:
    """The family of a recorded model: by its number of layers where its profile tells that, else by its name.

    Raises ValueError where neither settles it.
    """
    for name, family in FAMILIES.items():
        if family.layers == layers:
            return FAMILIES[name]
    for pattern, name in _NAMES:
        if layers is None and re.search(pattern, label.lower()):
            return FAMILIES[name]
    raise ValueError(
        f"{label}: no family with {layers or 'an unknown number of'} layers is known; add it to families.py"
    )
