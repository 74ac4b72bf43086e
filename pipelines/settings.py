"""Where pools are defined and where artifacts go: from the command line, or from the environment."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sandhi_core.artifacts import Artifacts
from sandhi_core.errors import PoolError, UsageError

if TYPE_CHECKING:
    from sandhi_core.pools.pool import Pool

CHECKOUT = Path(__file__).resolve().parent.parent
LOOK_SECONDS = 30
RETRY_SECONDS = 30
CLUSTER = "SANDHI_CLUSTER"
POOL_SUFFIXES = (".yaml", ".yml")


def default_root() -> Path:
    """SANDHI_HOME, or `.sandhi` in the checkout, from whatever directory the command is called."""
    return Path(os.environ.get("SANDHI_HOME", CHECKOUT / ".sandhi")).expanduser().resolve()


@dataclass(frozen=True)
class Settings:
    """`pools` is a directory of pool files, or one file; the rest is for runs that Dagster starts."""

    pools: Path
    root: Path
    devices: tuple[str, ...] = ()
    """What scores models, an entry a slot (resources/devices.py); by default one slot, on the pool file's device."""
    look_seconds: int = LOOK_SECONDS  # at least so long between two looks of the sensor
    retry_seconds: int = RETRY_SECONDS  # to the first retry of what can pass by itself
    webserver: str | None = None  # address at which the sensor has the code location reloaded
    cluster: bool = False  # whether runs are launched on other machines (pipelines/cluster.py)

    @classmethod
    def from_environment(cls) -> "Settings":
        """SANDHI_POOLS (a directory, or one file; by default `pools/` of the checkout), SANDHI_HOME, SANDHI_DEVICES,
        SANDHI_LOOK_SECONDS, SANDHI_RETRY_SECONDS, SANDHI_WEBSERVER and whether there is a SANDHI_CLUSTER.

        Raises UsageError where one of them cannot be what it says.
        """
        return cls(
            Path(os.environ.get("SANDHI_POOLS", CHECKOUT / "pools")).resolve(),
            default_root(),
            _devices(),
            _seconds("SANDHI_LOOK_SECONDS", LOOK_SECONDS),
            _seconds("SANDHI_RETRY_SECONDS", RETRY_SECONDS),
            os.environ.get("SANDHI_WEBSERVER") or None,
            bool(os.environ.get(CLUSTER)),
        )

    @classmethod
    def of_command(cls, pools: Path, root: Path) -> "Settings":
        """Of a command, which must plan for the devices that runs of Dagster score on: SANDHI_DEVICES, SANDHI_CLUSTER.

        Raises UsageError where the first cannot be what it says.
        """
        return cls(pools, root, _devices(), cluster=bool(os.environ.get(CLUSTER)))

    def pool_files(self) -> list[Path]:
        """Of a directory those whose names do not begin with a dot: they are other tools'."""
        if not self.pools.is_dir():
            return [self.pools]
        return sorted(file for file in self.pools.iterdir() if file.suffix in POOL_SUFFIXES and file.name[0] != ".")

    def given_files(self) -> list[Path]:
        """The pool files that a command was given. Raises UsageError where a directory holds none."""
        if files := self.pool_files():
            return files
        raise UsageError(
            "the directory holds no pool file (*.yaml, *.yml)", file=str(self.pools), remedy="name a pool file"
        )

    def placed(self, pool: "Pool") -> "Pool":
        """The pool with the kind of device that `auto` is here, so that whoever plans means what scores, on whatever
        machine and in whatever process. Raises PoolError on a cluster, where only the run would see its device."""
        if pool.evaluation.device != "auto":
            return pool
        if self.cluster:
            raise PoolError(
                f"evaluation.device of pool {pool.name} is auto, which each machine of a cluster takes otherwise",
                remedy="write `evaluation: {device: cuda}`, or cpu where the cluster's runs get no GPU",
            )
        return pool.on(self.devices[0].partition(":")[0]) if self.devices else pool

    def artifacts(self) -> Artifacts:
        return Artifacts(self.root)

    @property
    def slots(self) -> int:
        """How many steps may score at a time."""
        return max(len(self.devices), 1)


def _devices() -> tuple[str, ...]:
    named = tuple(name.strip() for name in os.environ.get("SANDHI_DEVICES", "").split(",") if name.strip())
    kinds = {name.partition(":")[0] for name in named}
    if any(not re.fullmatch(r"cpu|mps|cuda:[0-9]+", name, re.ASCII) for name in named) or len(kinds) > 1:
        raise UsageError(
            f"SANDHI_DEVICES is {','.join(named)!r}",
            remedy="name a device for each slot, all of one kind: cuda:0,cuda:1, or cpu,cpu for two slots on the CPU",
        )
    return named


def _seconds(name: str, default: int) -> int:
    given = os.environ.get(name) or str(default)
    if not re.fullmatch(r"[0-9]{1,5}", given, re.ASCII):
        raise UsageError(f"{name} is {given!r}", remedy="give whole seconds")
    return int(given)
