"""How many net bytes each way of sharing saves on a pool, and what every model loses on questions never used before.

Only bytes of shared matrices and of residuals are counted, against all bytes of the checkpoints; exact duplicates are
saved in every row alike and left out of all.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.ladders import Outcome, Sharing, by_ladder, by_rank, judged
from benchmarks.members import METHODS, Members, opened
from benchmarks.rows import seconds, table
from benchmarks.ways import say
from sandhi_core.pool import load_pool
from sandhi_core.records import Quality
from sandhi_core.rungs.allotment import RULES

FIXED = (0, 8, 16)
"""Ranks that every slot gets in the rows without a search; nought: the shared tensors alone."""
QUALITIES: tuple[Quality, ...] = ("point", "certified")


def outcomes(members: Members) -> Iterator[Outcome]:
    """Every way, one after the other."""
    for method in METHODS:
        begun = time.perf_counter()
        sharing = Sharing(members, method)
        say(f"{method}: shared tensors and spectra in {time.perf_counter() - begun:.1f} s")
        for rank in FIXED:
            yield judged(f"{method}, rank {rank} everywhere", sharing, partial(by_rank, sharing, rank))
        for rule, quality in product(RULES, QUALITIES):
            yield judged(f"{method}, ranks by {rule}, {quality}", sharing, partial(by_ladder, sharing, rule, quality))


def told(found: Sequence[Outcome]) -> str:
    """The rows as a table: a model's drop on the holdout and its one-sided 95 % bound, in points."""
    models = sorted(found[0].drops)
    head = ("way", "net bytes", "of all", "held", "evaluations", "s", *models)
    lines = [
        (
            *(o.name, f"{o.net:,}", f"{100 * o.net / o.whole:.1f} %", "yes" if o.within else "NO"),
            *(str(o.evaluations), seconds(o.seconds)),
            *(f"{100 * o.drops[m]:.1f} ({100 * o.bounds[m]:.1f})" for m in models),
        )
        for o in found
    ]
    return table(head, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rungs", description=__doc__)
    parser.add_argument("pools", type=Path, nargs="+", metavar="POOL.yaml")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where rungs-POOL.txt and .json are kept")
    options = parser.parse_args(arguments)
    for path in options.pools:
        pool, found = load_pool(path), list[Outcome]()
        with tempfile.TemporaryDirectory(prefix="sandhi-rungs-") as name:
            for outcome in outcomes(opened(pool, Path(name))):
                say(f"{pool.name}: {outcome.name}: {100 * outcome.net / outcome.whole:.1f} %")
                found.append(outcome)
        text = told(found)
        print(text)
        if options.out is not None:
            (options.out / f"rungs-{pool.name}.txt").write_text(text + "\n")
            (options.out / f"rungs-{pool.name}.json").write_text(json.dumps([vars(o) for o in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
