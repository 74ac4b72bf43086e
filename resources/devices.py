"""Which device a step scores on, where there are several: one that no other step is using.

Dagster's pool SCORING lets as many steps score at a time as there are devices; which of them each takes is decided
here, by a file a device that the kernel locks. It unlocks the file when the process ends, however it ends.
"""

import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sandhi_core.errors import UsageError

SCORING = "scoring"
WAIT_SECONDS = 0.5


@contextmanager
def device_slot(folder: Path, names: Sequence[str], wanted: str) -> Iterator[str]:
    """The name of a device that serves `wanted` (as evaluation.device says it) and is this process's until the end;
    waits for one. Without `names`, `wanted` itself.

    Raises UsageError where none of `names` can ever serve.
    """
    if not names:
        yield wanted
        return
    able = [f"{at}-{name}" for at, name in enumerate(names) if wanted in ("auto", name, name.partition(":")[0])]
    if not able:
        raise UsageError(
            f"evaluation.device is {wanted}, and SANDHI_DEVICES names {', '.join(names)}",
            remedy="let evaluation.device be auto, or name such a device in SANDHI_DEVICES",
        )
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        files = {slot: held.enter_context((folder / f"{slot}.lock").open("w")) for slot in able}
        while (taken := next((slot for slot, file in files.items() if _locked(file.fileno())), None)) is None:
            time.sleep(WAIT_SECONDS)
        yield taken.partition("-")[2]


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
