"""What the weights of models take that are held at once by transformers, by process."""

from collections.abc import Mapping
from pathlib import Path

from sandhi_core.memory import accounts
from sandhi_core.records import ProcessMemory
from sandhi_core.serving.measure import hold
from sandhi_core.serving.together import TIMEOUT


def measure(directories: Mapping[str, Path], timeout: float = TIMEOUT) -> tuple[ProcessMemory, ...]:
    return accounts(hold(directories, timeout=timeout).holders)
