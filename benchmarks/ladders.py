"""What a ladder's savings are made of: what each rung adds, how ranks lie over layers and projections, and how savings
grow with the pool.

Every row of `sizes` is a whole build of the first so many models of the pool file, every row of `rungs` one of all of
them in which a ladder has one rung more.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.lines import BESIDES, BOTH, EVERY_METHOD, LADDER, Way, built, rows
from benchmarks.outcomes import Outcome
from benchmarks.rows import seconds, table
from benchmarks.ways import say
from sandhi_core.artifacts import Artifacts
from sandhi_core.assignment import assignment_at
from sandhi_core.checkpoints.architectures import ORDER
from sandhi_core.pools.pool import Pool, load_pool
from sandhi_core.records import Fingerprint, OperatingPoints, Trajectory
from sandhi_core.words import percent


def _with(methods: Sequence[str], **merging: object) -> Way:
    sections = {**LADDER, "merging": {**LADDER["merging"], "methods": list(methods), **merging}}
    return Way(sections, BOTH, bases="base" in methods)


RUNGS: Mapping[str, Way] = {
    "ladder": Way(LADDER, BOTH),
    "and a base's tensor": _with(["mean", "base"]),
    "and a member's tensor": _with(["mean", "member"]),
    "and RegMean": _with(["mean", "regmean"]),
    "and all three": _with(EVERY_METHOD),
    "and contributors left out": _with(["mean"], reform=True),
    "and norms, embeddings": Way({**LADDER, "grouping": BESIDES}, BOTH),
    "and scaled rows": _with(["mean"], affine="rows"),
}


def rungs(pool: Pool, bases: Sequence[Path], folder: Path) -> str:
    """What a ladder saves that has one rung more than the first row's."""
    lines = []
    for number, (name, way) in enumerate(RUNGS.items()):
        say(f"{pool.name}: {name}")
        (folder / str(number)).mkdir()
        found = list(rows(name, way, pool, bases, folder / str(number)))
        lines.append((name, *(percent(o.net, o.whole) for o in found), str(found[-1].evaluations)))
    return table(("rungs", *BOTH, "evaluations"), lines)


def ranks(root: Path, pool: Pool) -> str:
    """By layer and projection: the mean rank over the models that share there, and of how many that is."""
    artifacts = Artifacts(root)
    points = artifacts.load(OperatingPoints, "operating_points", pool.name)
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    could: dict[tuple[int, str], int] = defaultdict(int)
    for entry in pool.models:
        trajectory = artifacts.load(Trajectory, "trajectory", f"{pool.name}.{entry.name}")
        held = assignment_at(trajectory, points.deployed.cutoffs[entry.name])
        offered = {name for step in trajectory.steps for name in step.tensors}
        for slot in artifacts.load(Fingerprint, "checkpoint", entry.name).slots:
            could[slot.layer, slot.projection] += slot.tensor in offered
            if slot.tensor in held.tensors:
                adjustment = held.adjustments.get(slot.tensor)
                found[slot.layer, slot.projection].append(adjustment.rank if adjustment else 0)
    projections = [p for p in ORDER if any(at[1] == p for at in could)]
    lines = [
        (str(layer), *(_cell(found[layer, p], could[layer, p]) for p in projections))
        for layer in sorted({at[0] for at in could})
    ]
    return table(("layer", *projections), lines)


def _cell(taken: Sequence[int], could: int) -> str:
    return f"{fmean(taken):.1f} ({len(taken)}/{could})" if taken else f"- (0/{could})"


def sizes(pool: Pool, folder: Path) -> list[tuple[int, Outcome]]:
    """Builds of the first two, three, ... models; that of all leaves its root in `folder`."""
    found = []
    for count in range(2, len(pool.models) + 1):
        say(f"{pool.name}: {count} models")
        place = folder / str(count)
        place.mkdir()
        smaller = pool.model_copy(update={"models": pool.models[:count]})
        found.append((count, built(f"{count} models", smaller, {**LADDER, "holdout": {"quality": "point"}}, place)))
    return found


def growth(pool: Pool, folder: Path) -> str:
    """Both tables about the plain ladder: of `sizes` and of `ranks`."""
    found = sizes(pool, folder)
    head = ("models", "net bytes", "of all", "bytes served a model", "evaluations", "s")
    lines = [
        (
            *(str(n), f"{o.net:,}", percent(o.net, o.whole), f"{(o.whole - o.net) // n:,}"),
            *(str(o.evaluations), seconds(o.seconds)),
        )
        for n, o in found
    ]
    title = "mean rank of the models that share (how many do, of how many could)"
    return f"{table(head, lines)}\n\n{title}\n{ranks(folder / str(len(pool.models)) / 'root', pool)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladders", description=__doc__)
    parser.add_argument("what", choices=("growth", "rungs"))
    parser.add_argument("pool", type=Path, metavar="POOL.yaml")
    parser.add_argument("--bases", type=Path, nargs="+", default=[], metavar="DIR", help="what the models came from")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where ladders-WHAT-POOL.txt is kept")
    options = parser.parse_args(arguments)
    pool = load_pool(options.pool)
    with tempfile.TemporaryDirectory(prefix="sandhi-ladders-") as name:
        if options.what == "growth":
            text = growth(pool, Path(name))
        else:
            text = rungs(pool, [base.resolve() for base in options.bases], Path(name))
    if options.out is not None:
        (options.out / f"ladders-{options.what}-{pool.name}.txt").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
