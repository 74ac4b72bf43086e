"""How many net bytes each way of sharing saves on a pool, and what every model loses on questions never used before.

Rows of the pipeline are whole builds, from pool file to proof. One merged model takes a base's models together;
adapters are cut from the difference to the base. Rows whose models lose more than their budgets say so.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import lines
from benchmarks.lines import WAYS
from benchmarks.outcomes import Loss, Outcome, told
from benchmarks.scoring import CACHE
from benchmarks.ways import commit, say
from benchmarks.wholes import Bases, Wholes
from sandhi_core.pools.pool import Pool, load_pool
from sandhi_core.words import percent

WHOLES = "without a search"
EXAMPLE = """example:
  python -m benchmarks.rungs pools/demo.yaml --out benchmarks \\
      --base .sandhi-demo/demo/models/base sorter ranker converter inflector chemist"""


def outcomes(pool: Pool, bases: Bases, mergekit: Path | None, ways: Sequence[str], folder: Path) -> Iterator[Outcome]:
    """Every way, one after the other."""
    if WHOLES in ways:
        (folder / "wholes").mkdir()
        yield from Wholes(pool, bases, folder / "wholes").rows(mergekit)
    for number, name in enumerate(way for way in ways if way != WHOLES):
        (folder / str(number)).mkdir()
        yield from lines.rows(name, WAYS[name], pool, list(bases), folder / str(number))


def _read(file: Path) -> list[Outcome]:
    rows = json.loads(file.read_text()) if file.exists() else []
    return [Outcome(**{**row, "losses": {m: Loss(**loss) for m, loss in row["losses"].items()}}) for row in rows]


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
    every = [WHOLES, *WAYS]
    parser.add_argument(
        "--ways", nargs="+", choices=every, default=every, metavar="WAY",
        help=f"rows to measure; those of other ways stay as they were kept in --out: {', '.join(every)}",
    )  # fmt: skip
    parser.add_argument("--no-mergekit", action="store_true", help="leave its rows out")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where rungs-POOL.txt and .json are kept")
    options = parser.parse_args(arguments)
    pool = load_pool(options.pool)
    bases = {Path(base).resolve(): models for base, *models in options.base}
    if unknown := {m for models in bases.values() for m in models} - {entry.name for entry in pool.models}:
        parser.error(f"{', '.join(sorted(unknown))}: no model of pool {pool.name}")
    mergekit = None if options.no_mergekit else CACHE / "mergekit"
    kept = options.out and options.out / f"rungs-{pool.name}.json"
    found = {one.name: one for one in (_read(kept) if kept else [])}
    with tempfile.TemporaryDirectory(prefix="sandhi-rungs-") as name:
        for outcome in outcomes(pool, bases, mergekit, options.ways, Path(name)):
            say(f"{pool.name}: {outcome.name}: {percent(outcome.net, outcome.whole)}")
            found[outcome.name] = replace(outcome, commit=commit())
            if kept:  # after every row: a run takes long
                kept.with_suffix(".txt").write_text(told(list(found.values())) + "\n")
                kept.write_text(json.dumps([_plain(one) for one in found.values()], indent=1) + "\n")
    print(told(list(found.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
