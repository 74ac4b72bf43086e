"""The `sandhi` command. Building and reporting lives in the checkout (pipelines/cli.py), which pip installs in editable
mode; serving needs the package alone (serving/cli.py)."""

import importlib
import signal
import sys
from pathlib import Path


def main() -> int:
    """Hand over to pipelines.cli of the checkout that this package belongs to, or without one to serving.cli; exit
    status as there."""
    checkout = Path(__file__).resolve().parent.parent
    whole = (checkout / "pipelines" / "cli.py").is_file()
    if not whole and sys.argv[1:2] and sys.argv[1] in _OF_CHECKOUTS:
        print(
            f"sandhi: {sys.argv[1]} needs a checkout of the repository (pip install -e '.[pipeline]' in it); "
            "the wheel alone serves, renders and verifies",
            file=sys.stderr,
        )
        return 2
    # What ends a command waits until the command can answer; the imports take a moment.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    if not whole:
        from sandhi_core.serving import cli

        return cli.main(sys.argv[1:])
    # First on the path: other distributions may install packages named `resources` or `assets`.
    sys.path.insert(0, str(checkout))
    status: int = importlib.import_module("pipelines.cli").main()
    return status


_OF_CHECKOUTS = ("check", "build", "report", "schema")


if __name__ == "__main__":
    sys.exit(main())
