"""Seeds from names, so that no model and no task depends on what was made before it."""

from __future__ import annotations

import hashlib
from random import Random


def seed(*names: str) -> int:
    """A seed of 63 bits that depends on nothing but the names."""
    return int.from_bytes(hashlib.sha256("/".join(names).encode()).digest()[:8], "big") >> 1


def seeded(*names: str) -> Random:
    """A generator seeded by the names."""
    return Random(seed(*names))
