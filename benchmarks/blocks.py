"""What it costs to keep the moments of wide inputs in blocks: the error left at the same rank, and by RegMean.

Inputs wider than 4096 are kept in blocks along the diagonal, 14336 in three and a half. Here the inputs of models that
are narrow enough to be kept whole are cut in four, and what is made from the blocks is judged by the whole moments.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.rows import table
from benchmarks.ways import say
from benchmarks.wholes import Member, Wholes
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.evaluation.inputs import Inputs
from sandhi_core.pools.pool import load_pool
from sandhi_core.records import Slot
from sandhi_core.rungs.grams import Gram, regmean
from sandhi_core.rungs.residual import spectrum, weighting

RANK, PARTS = 16, 4


def cut(gram: Gram, parts: int = PARTS) -> Gram:
    """The same moments in so many blocks of equal size, but for the last."""
    (whole,) = gram.blocks
    step = -(-gram.width // parts)
    return Gram(tuple(whole[at : at + step, at : at + step] for at in range(0, gram.width, step)), gram.centre)


def residuals(member: Member, base: Checkpoint, inputs: Inputs) -> Iterator[tuple[str, float]]:
    """By slot its projection, and the error that a residual leaves with blocks over that which it leaves without."""
    for slot in member.fingerprint.slots:
        own, shared = (of.tensor(slot.tensor).double() for of in (member.checkpoint, base))
        gram = inputs.gram(slot.tensor)
        left = []
        for weighs in (cut(gram), gram):
            found = spectrum(own, shared, weighting(weighs))
            rest = own - shared - found.up[:, :RANK] @ found.down[:RANK]
            left.append(gram.damped().energy(rest))
        if left[1] > 0:
            yield slot.projection, left[0] / left[1]


def averages(members: Sequence[Member], inputs: Sequence[Inputs]) -> Iterator[tuple[str, float]]:
    """By slot its projection, and the error of all members under RegMean with blocks over that without."""
    slots: Sequence[Slot] = members[0].fingerprint.slots
    for slot in slots:
        tensors = [member.checkpoint.tensor(slot.tensor) for member in members]
        grams = [one.gram(slot.tensor) for one in inputs]
        errors = [
            sum(
                gram.damped().energy(tensor.double() - merged) / gram.damped().energy(tensor)
                for tensor, gram in zip(tensors, grams, strict=True)
            )
            for merged in (regmean(tensors, [cut(gram) for gram in grams]), regmean(tensors, grams))
        ]
        if errors[1] > 0:
            yield slot.projection, errors[0] / errors[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocks", description=__doc__)
    parser.add_argument("pool", type=Path, metavar="POOL.yaml")
    parser.add_argument("--base", nargs="+", required=True, metavar=("DIR", "MODEL"), help="models that share a base")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where blocks-POOL.txt is kept")
    options = parser.parse_args(arguments)
    pool, (base, *names) = load_pool(options.pool), options.base
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="sandhi-blocks-") as name:
        members = list(Wholes(pool, {}, Path(name)).members.values())
        members = [member for member in members if member.entry.name in names]
        inputs = [Inputs(Path(name) / "inputs", member.fingerprint, member.evaluator) for member in members]
        opened = Checkpoint.open(Path(base), "base")
        for member, one in zip(members, inputs, strict=True):
            say(member.entry.name)
            for projection, ratio in residuals(member, opened, one):
                found[projection][f"residual of rank {RANK}"].append(ratio)
            member.evaluator.release()
        for projection, ratio in averages(members, inputs):
            found[projection]["RegMean"].append(ratio)
    kinds = (f"residual of rank {RANK}", "RegMean")
    lines = [
        (projection, *(f"{fmean(ratios[kind]):.3f} ({max(ratios[kind]):.3f})" for kind in kinds))
        for projection, ratios in found.items()
    ]
    text = table(("error in blocks over whole: mean (most)", *kinds), lines)
    if options.out is not None:
        (options.out / f"blocks-{pool.name}.txt").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
