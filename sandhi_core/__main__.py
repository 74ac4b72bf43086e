"""The `sandhi` command. It lives in the checkout (pipelines/cli.py), which pip installs in editable mode."""

import importlib
import signal
import sys
from pathlib import Path


def main() -> int:
    """Hand over to pipelines.cli of the checkout that this package belongs to; exit status as there."""
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / "pipelines" / "cli.py").is_file():
        print(
            "sandhi: the command line needs a checkout of the repository (pip install -e '.[pipeline]' in it); "
            "the wheel alone holds the library and the loaders",
            file=sys.stderr,
        )
        return 2
    # What ends a command waits until the command can answer; the imports take a moment.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    # First on the path: other distributions may install packages named `resources` or `assets`.
    sys.path.insert(0, str(checkout))
    status: int = importlib.import_module("pipelines.cli").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
