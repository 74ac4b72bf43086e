"""The `sandhi` command. Building and reporting lives in the checkout (pipelines/cli.py), which pip installs in editable
mode; serving needs the package alone (cli.py)."""

import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of this package, or of the checkout that it belongs to; exit status as in cli.py."""
    # What ends a command waits until the command can answer; the imports take a moment.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    from sandhi_core import cli

    commands = cli.COMMANDS
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pipelines" / "cli.py").is_file():
        if sys.path[0] != str(checkout):  # other distributions may install packages named `resources` or `assets`
            sys.path.insert(0, str(checkout))
        commands = {**importlib.import_module("pipelines.cli").COMMANDS, **commands}
    return cli.main(argv, commands)


if __name__ == "__main__":
    sys.exit(main())
