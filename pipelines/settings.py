"""Where pools are defined and where artifacts go: from the command line, or from the environment."""

import os
from dataclasses import dataclass
from pathlib import Path

from sandhi_core.artifacts import Artifacts

CHECKOUT = Path(__file__).resolve().parent.parent


def default_root() -> Path:
    """SANDHI_HOME, or `.sandhi` in the checkout, from whatever directory the command is called."""
    return Path(os.environ.get("SANDHI_HOME", CHECKOUT / ".sandhi")).expanduser().resolve()


@dataclass(frozen=True)
class Settings:
    """`pools` is a directory of pool files, or one file."""

    pools: Path
    root: Path

    @classmethod
    def from_environment(cls) -> "Settings":
        """SANDHI_POOLS (a directory, or one file; by default `pools/` of the checkout) and SANDHI_HOME."""
        return cls(Path(os.environ.get("SANDHI_POOLS", CHECKOUT / "pools")).resolve(), default_root())

    def pool_files(self) -> list[Path]:
        return sorted(self.pools.glob("*.yaml")) if self.pools.is_dir() else [self.pools]

    def artifacts(self) -> Artifacts:
        return Artifacts(self.root)
