"""How many net bytes each way of sharing saves on a pool, and what every model loses on questions never used before.

Rows of the pipeline are whole builds, from pool file to proof. One merged model takes a base's models together;
adapters are cut from the difference to the base. Rows whose models lose more than their budgets say so.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lines import WAYS, built
from benchmarks.outcomes import Outcome, told
from benchmarks.scoring import CACHE
from benchmarks.ways import say
from benchmarks.wholes import Bases, Wholes
from sandhi_core.pool import Pool, load_pool

EXAMPLE = """example:
  python -m benchmarks.rungs pools/demo.yaml --out benchmarks \\
      --base .sandhi-demo/demo/models/base sorter ranker converter inflector chemist"""


def outcomes(pool: Pool, bases: Bases, mergekit: Path | None, ways: Sequence[str], folder: Path) -> Iterator[Outcome]:
    """Every way, one after the other."""
    (folder / "wholes").mkdir()
    yield from Wholes(pool, bases, folder / "wholes").rows(mergekit)
    for number, name in enumerate(ways):
        (folder / str(number)).mkdir()
        yield built(name, pool, WAYS[name], folder / str(number))


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {**vars(outcome), "losses": {model: vars(loss) for model, loss in outcome.losses.items()}}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rungs",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pool", type=Path, metavar="POOL.yaml")
    parser.add_argument(
        "--base", nargs="+", action="append", default=[], metavar=("DIR", "MODEL"),
        help="a checkpoint and the models that were trained from it; without one there are no rows that need a base",
    )  # fmt: skip
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--no-mergekit", action="store_true", help="leave its rows out")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where rungs-POOL.txt and .json are kept")
    options = parser.parse_args(arguments)
    pool, found = load_pool(options.pool), list[Outcome]()
    bases = {Path(base).resolve(): models for base, *models in options.base}
    if unknown := {m for models in bases.values() for m in models} - {entry.name for entry in pool.models}:
        parser.error(f"{', '.join(sorted(unknown))}: no model of pool {pool.name}")
    mergekit = None if options.no_mergekit else CACHE / "mergekit"
    with tempfile.TemporaryDirectory(prefix="sandhi-rungs-") as name:
        for outcome in outcomes(pool, bases, mergekit, options.ways, Path(name)):
            say(f"{pool.name}: {outcome.name}: {100 * outcome.net / outcome.whole:.1f} %")
            found.append(outcome)
            if options.out is not None:  # after every row: a run takes long
                (options.out / f"rungs-{pool.name}.txt").write_text(told(found) + "\n")
                rows = json.dumps([_plain(one) for one in found], indent=1)
                (options.out / f"rungs-{pool.name}.json").write_text(rows + "\n")
    print(told(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
