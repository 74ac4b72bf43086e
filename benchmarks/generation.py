"""The row `generation`: outputs after a small change in the middle, from drafts and decoded again."""

from pathlib import Path

from benchmarks.changes import Source, near
from benchmarks.questions import GENERATION, SPLIT, decisions, suite, write
from benchmarks.rows import Row, peak_mib
from benchmarks.ways import Agreement, Clock, Theirs, resident, say

SHARE = 0.05
"""Of a projection's standard deviation: how far its elements are moved."""


def generation(source: Source, folder: Path, questions: int, shots: int, threads: int) -> Row:
    """Scores the original once by each way, then the changed model: that is the row."""
    clock, agreed = Clock(), Agreement()
    held = resident(source.directory, threads)
    asked = suite(write(folder / "tasks", questions, shots=shots), [GENERATION], folder / "cache")
    theirs = Theirs(held, asked)
    middle = source.fingerprint.layers // 2
    changed = {slot.tensor: "near" for slot in source.components["mlp", middle]}
    decoded = 0
    for when, tensors in (("first", {}), ("again", changed)):
        held.hold(tensors, lambda name: near(source.checkpoint.tensor(name), SHARE, "generation", name))
        before = held.scorer.drafts.decoded
        with clock(f"ours, {when}"):
            held.answers(asked, SPLIT)
        decoded = held.scorer.drafts.decoded - before
        found = decisions(asked)
        with clock(f"theirs, {when}"):
            theirs.answers()
        agreed.add(found, decisions(asked))
        say(f"generation, {when}: {clock.spent[f'ours, {when}']:.1f} s ours")
    count = len(found)
    notes = [
        f"MLP of layer {middle} moved by {SHARE:g} of its standard deviation; {decoded} of {count} outputs had to be "
        f"decoded in part or whole; lm-eval's batch size {theirs.batch}",
        f"the outputs before the change, once: ours {clock.spent['ours, first']:.1f} s, "
        f"other {clock.spent['theirs, first']:.1f} s",
    ]
    figures = {"seconds": clock.spent, "decoded": decoded, "outputs": count, "batch_size": theirs.batch}
    against = "generating again in memory"
    spent = clock.spent["ours, again"], clock.spent["theirs, again"]
    return Row("generation", source.name, against, *spent, str(agreed), notes, figures, peak_mib())
