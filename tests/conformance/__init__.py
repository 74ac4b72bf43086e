"""Replays what SANDHI's authors recorded on real 7B, 8B and 32B models through Sandhi's own code.

The recordings are data that is not part of this repository: `SANDHI_ARTIFACT` names the directory. What reads them
(families, recorded, candidates) turns them into Sandhi's records and decides nothing.
"""

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def artifact() -> Path:
    """Where the recordings are, or would be."""
    return Path(os.environ.get("SANDHI_ARTIFACT") or CHECKOUT.parent / "shared" / "sandhi-artifact")
