"""One root, built by `sandhi build` that is killed again and again, each time further on; then once more to the end.

    python -m tests.crash.builds FOLDER

prints a line of JSON a build with what was wrong: nothing where every kill found its place and left no process, and the
last build ends with what the stages give that were never disturbed.
"""

import argparse
import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sandhi_core.__main__ import main as sandhi
from tests.crash import line
from tests.crash.faults import Event, Verdict, When, watch, watch_commits
from tests.crash.forked import Ended, forked

for module in ("pipelines.building", "pipelines.checking", "pipelines.headless"):
    importlib.import_module(module)  # now, so that no child has to

Place = tuple[str, str, When]

KILLS: tuple[Place, ...] = (
    ("commit", "dagster", "before"),
    ("write", "/scores/a.jsonl", "torn"),
    ("replace", "/records/groups/", "before"),
    ("rename", "/exports/", "after"),
    ("process", "", "after"),
    ("replace", "/deployment.json", "before"),
    ("replace", "/report.html", "before"),
)
"""Operation, a part of the path, and when: in the order in which a build comes there."""

MEASURED = ("records/sharing_proof", "records/deployment", "reports/")
"""What holds measurements, or is drawn from them."""


def built(folder: Path, pool: Path, root: Path, place: Place | None) -> Ended:
    def decide(event: Event) -> Verdict:
        if place is None or event.operation != place[0] or place[1] not in event.path:
            return None
        return place[2]

    def work(tell: Callable[[Any], None]) -> None:
        os.environ.pop("DAGSTER_HOME", None)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        watch(root, decide)
        watch_commits(root, decide)
        tell(["status", sandhi(["build", str(pool), "--root", str(root)])])

    return forked(folder, work)


def undisturbed(folder: Path, pool: Path) -> tuple[line.Tree, int]:
    """The stages' files and the number of their evaluations, from a root of their own."""
    root = folder / "undisturbed"

    def work(tell: Callable[[Any], None]) -> None:
        for node in line.nodes(pool):
            line.run(pool, root, node, lambda model, seconds: None)

    ended = forked(folder, work)
    assert ended.sound, ended
    return line.tree(root), line.lines(root)


def life(folder: Path) -> Iterator[tuple[Place | None, list[str]]]:
    """Each kill, and at last the build to the end, with what was wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    pool, root = line.make_pool(folder), folder / "root"
    wanted, scored = undisturbed(folder, pool)
    for place in KILLS:
        ended = built(folder, pool, root, place)
        found = [] if ended.killed else [f"was not killed: {ended}"]
        found += [f"is left running: {process}" for process in ended.left]
        yield place, found + line.exports_problems(root)
    ended = built(folder, pool, root, None)
    found = [] if ended.told == [["status", 0]] and not ended.left else [f"{ended}"]
    if line.lines(root) != scored:
        found.append(f"{line.lines(root)} scores are kept, not {scored}")
    tree = {path: kept for path, kept in line.tree(root).items() if not path.startswith(MEASURED)}
    tree = {path: kept for path, kept in tree.items() if not path.endswith("/deployment.json")}
    yield None, found + line.differences(wanted, tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for place, wrong in life(parser.parse_args().folder):
        print(json.dumps({"place": place, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
