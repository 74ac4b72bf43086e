"""`make ui`: the Dagster UI on the instance of the artifact root."""

import argparse
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
        # Where one of its processes dies of a mapped file that was cut short, it says where, as `sandhi` does.
        env={
            "SANDHI_WEBSERVER": _address(sys.argv[1:]),
            "PYTHONFAULTHANDLER": "1",
            **os.environ,
            "PYTHONWARNINGS": warnings,
        },
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


def _address(arguments: list[str]) -> str:
    """Where the webserver will be, given what `dagster dev` is called with: its own sensor has it reload pool files."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", "-h", default="127.0.0.1")
    parser.add_argument("--port", "-p", default="3000")
    known, _ = parser.parse_known_args(arguments)
    return f"http://{known.host}:{known.port}"


if __name__ == "__main__":
    sys.exit(main())
