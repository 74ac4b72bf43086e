"""The rows `sweep` and `reference`: noise in every component once, scored ours in full; on some components also by
lm-eval's model in memory, and by a new lm_eval process on a changed checkpoint."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.changes import Source
from benchmarks.models import rewritten
from benchmarks.questions import SPLIT, TASKS, decisions, suite, write
from benchmarks.rows import Row, peak_mib
from benchmarks.ways import Agreement, Clock, Theirs, process, resident, say, start
from sandhi_core.grouping.order import Place


def spread(places: Sequence[Place], count: int) -> list[Place]:
    """`count` of them, evenly from the first to the last."""
    count = min(count, len(places))
    if count < 2:
        return list(places[:count])
    return [places[round(i * (len(places) - 1) / (count - 1))] for i in range(count)]


def sweep(
    source: Source, folder: Path, questions: int, components: int, processes: int, shots: int, threads: int
) -> list[Row]:
    """Both rows; with no `processes` the first alone. `folder`: an empty one for tasks and changed checkpoints."""
    clock, small, large = Clock(), Agreement(), Agreement()
    with clock("start"):
        start()
    tasks = write(folder / "tasks", questions, shots=shots)
    with clock("load"):
        held = resident(source.directory, threads)
        asked = suite(tasks, TASKS, folder / "cache")
    places = list(source.components)  # read before anything is timed, as the pool's checkpoint stage does
    theirs = Theirs(held, asked)
    by_theirs, by_process = spread(places, components), spread(places, processes)
    for number, place in enumerate([None, *places]):
        tensors, read = source.noise(place) if place else ({}, source.checkpoint.tensor)
        with clock("change"):
            held.hold(tensors, read)
        with clock("ours"):
            held.answers(asked, SPLIT)
        found = decisions(asked)
        if place is None or place in by_theirs:
            with clock("theirs"):
                theirs.answers()
            small.add(found, decisions(asked))
        if place in by_process:
            with clock("process"):
                changed = rewritten(source.directory, folder / "changed", {name: read(name) for name in tensors})
                answers = process(changed, tasks, asked, threads, folder / "results")
            large.add(found, answers)
            shutil.rmtree(changed)
            shutil.rmtree(folder / "results")
        say(f"sweep: {number} of {len(places)} components, {clock.spent['ours']:.0f} s ours")
    return _rows(source, len(places), clock, theirs.batch, (small, large))


def _rows(source: Source, places: int, clock: Clock, batch: int, agreed: tuple[Agreement, Agreement]) -> list[Row]:
    whole = places + 1
    ready = clock.spent["start"] + clock.spent["load"]
    ours = ready + clock.spent["change"] + clock.spent["ours"]
    theirs = ready + clock.spent["change"] + whole * clock.mean("theirs")
    parts = {"seconds": clock.spent, "times": clock.times, "components": places, "batch_size": batch}
    note = f"ours in full; lm-eval's scoring timed on {clock.times['theirs']} of {whole} evaluations"
    rest = "the rest extrapolated" if clock.times["theirs"] < whole else "none extrapolated"
    note += f", {rest}; its batch size {batch}; starting, loading and changing weights counted alike"
    against = "lm-eval's model in memory"
    rows = [Row("sweep", source.name, against, ours, theirs, str(agreed[0]), [note], parts, peak_mib())]
    if timed := clock.times.get("process", 0):
        processes = whole * clock.mean("process")
        note = f"{timed} of {whole} checkpoints saved and scored by a process each"
        note += ", the rest extrapolated" if timed < whole else ""
        rows.append(
            Row("reference", source.name, "lm_eval anew", ours, processes, str(agreed[1]), [note], parts, peak_mib())
        )
    return rows
