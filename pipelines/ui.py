"""`make ui`: the Dagster UI on the instance of the artifact root."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from pipelines.instance import dagster_home
from pipelines.settings import CHECKOUT, Settings

# Dagster points to `dg dev`, a package of its own with a cloud client behind it, which starts these same services.
QUIET = "ignore:Function `dev_command` is superseded"


def main() -> int:
    """Run `dagster dev` until it ends or SIGINT, SIGTERM or SIGHUP asks for its end, which is then no failure.

    It runs in a session of its own: of Ctrl-C its services would each hear beside it, and complain.
    """
    dagster_home(Settings.from_environment().root)
    dagster = str(Path(sys.executable).with_name("dagster"))
    warnings = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), QUIET)))
    asked = False
    served = subprocess.Popen(
        [dagster, "dev", "--workspace", "workspace.yaml", *sys.argv[1:]],
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONWARNINGS": warnings},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        served.send_signal(signal.SIGINT)

    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, stop)
    status = served.wait()
    with suppress(ProcessLookupError):  # services of one that was stopped while it started
        os.killpg(served.pid, signal.SIGTERM)
    return 0 if asked else status


if __name__ == "__main__":
    sys.exit(main())
