"""GPUs as `sandhi serve` uses them: whether engines run on them, and the processes that own shared tensors there."""

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sandhi_core.errors import ServingError

Device = Literal["cpu", "cuda"]
LIBRARY = "libcuda.so.1"
"""What the driver's package installs; libcuda.so is only a name for linkers, in the toolkit."""
RANK = "{rank}"
"""In the path of an owner's socket: stands for the rank."""
_ASKING = 120.0  # seconds to import torch
_SEES = "import sys, torch; sys.exit(not torch.cuda.is_available())"


def device_of(python: str) -> Device:
    """What the engines of an environment compute on: `cuda` where its torch sees a GPU.

    Raises ServingError where that cannot be told.
    """
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return "cpu"  # without asking, which takes seconds
    try:
        asked = subprocess.run([python, "-c", _SEES], capture_output=True, timeout=_ASKING)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServingError(f"{python} does not say whether it sees a GPU: {error}", remedy="give --device") from None
    return "cpu" if asked.returncode else "cuda"


def socket_path(port: int) -> str:
    """Where owners listen for a fleet whose first server has this port: no other of this machine has it then."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return f"{runtime}/sandhi-{os.geteuid()}-{port}-{RANK}.sock"


@dataclass(frozen=True)
class OwnerProcess:
    """The owner for one rank, on the GPU of that number."""

    rank: int
    ranks: int
    socket: Path

    def command(self, export: Path, python: str) -> tuple[str, ...]:
        place = ("--device", str(self.rank), "--socket", str(self.socket))
        ranks = ("--tensor-parallel", str(self.ranks), "--rank", str(self.rank))
        return (python, "-m", "sandhi_core.serving.cuda.owner", str(export), *place, *ranks)


def owners(path: str, ranks: int) -> Iterator[OwnerProcess]:
    """One for each rank; `path` is of their sockets."""
    for rank in range(ranks):
        yield OwnerProcess(rank, ranks, Path(path.replace(RANK, str(rank))))
