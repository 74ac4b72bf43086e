"""What docs/reference.md says, from the recordings: `python -m tests.conformance` prints its tables; with `--pool` it
writes a run as a pool that `sandhi report` draws."""

import argparse
import sys
from pathlib import Path

from tests.conformance import artifact
from tests.conformance.pool import write_pool
from tests.conformance.recorded import recorded_runs
from tests.conformance.tables import tables


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description="Print the tables of docs/reference.md from the recordings at SANDHI_ARTIFACT.",
        epilog="example: python -m tests.conformance --pool llama5 /tmp/recorded",
    )
    parser.add_argument("--pool", nargs=2, metavar=("RUN", "DIR"), help="write a run as a pool for `sandhi report`")
    arguments = parser.parse_args()
    runs = {run.name: run for run in recorded_runs(artifact())}
    if not runs:
        print(f"no recorded runs at {artifact()}: set SANDHI_ARTIFACT", file=sys.stderr)
        return 2
    if arguments.pool is None:
        print(tables(artifact()), end="")
        return 0
    name, folder = arguments.pool
    if name not in runs:
        print(f"no run named {name}; there are {', '.join(runs)}", file=sys.stderr)
        return 2
    file = write_pool(runs[name], Path(folder))
    print(f"sandhi report {file} --root {file.parent / 'root'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
