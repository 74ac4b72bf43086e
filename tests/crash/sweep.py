"""One run a point: at every place where a stage writes, the process is killed or the disk refuses, and what is there is
looked at, before and after the stage is run again.

    python -m tests.crash.sweep FOLDER [--every] [--stages STAGE...]

prints one line of JSON a point, with what was wrong there; --every takes every place of every stage by the whole
way that leads to it; else each innermost place is taken once, and what is said of a kind of call once a kind. --stages
takes places of these stages only.
"""

import argparse
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from sandhi_core.graph import Node
from tests.crash import line
from tests.crash.faults import Event, Verdict, watch
from tests.crash.forked import Ended, forked

Fault = Literal["before", "torn", "after", "full", "denied", "broken"]
"""When the process is killed; or what the file system answers, from there on: that the disk is full, that nothing may
be written, or that the disk fails."""

ERRORS = {"full": errno.ENOSPC, "denied": errno.EACCES, "broken": errno.EIO}
TAKES_SPACE = ("open", "write", "mkdir", "link", "symlink", "fsync")
QUICK = (*"plan cutoffs operating_points checkpoint merged_weights profile holdout groups trajectory".split(),)
"""Stages, those that take no time first: a place that several lead to is tried in the first of them."""

CHANGES = (*TAKES_SPACE, "replace", "rename", "unlink", "rmdir", "chmod")

REACHES = {"full": TAKES_SPACE, "denied": CHANGES, "broken": CHANGES}
"""The operations that an error comes to."""


@dataclass
class Recorded:
    """A node that ran undisturbed, from the tree `before` to the tree `after`. `passing`: contents that had a final
    name for a while."""

    node: Node
    before: line.Tree
    after: line.Tree
    scored: int
    events: list[Event] = field(default_factory=list)
    passing: set[tuple[str, str]] = field(default_factory=set)


@dataclass(frozen=True)
class Point:
    """The first event of a node with this operation and place."""

    at: int  # of the node among all
    node: Node
    operation: str
    site: tuple[str, ...]
    fault: Fault


class Sweep:
    """`folder` takes everything: the pool, the artifact root (always in one place: libraries name files by it) and a
    copy of the root before each node."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        self.pool = line.make_pool(self.folder)
        self.root = self.folder / "root"
        self.root.mkdir()
        self.recorded = [self._record(at, node) for at, node in enumerate(line.nodes(self.pool))]

    def _kept(self, at: int) -> Path:
        return self.folder / f"before-{at}"

    def _record(self, at: int, node: Node) -> Recorded:
        line.copied(self.root, self._kept(at))
        before = line.tree(self.root)

        def work(tell: Callable[[Any], None]) -> None:
            def done(event: Event) -> None:
                path, named = Path(event.path), event.operation in ("replace", "rename", "link")
                shown = path.is_file() and not _hidden(self.root, path)
                tell([event.operation, event.path, event.site, line.digest(path) if named and shown else ""])

            watch(self.root, lambda event: None, done)
            line.run(self.pool, self.root, node, lambda model, seconds: tell("evaluated"))

        ended = forked(self.folder, work)
        assert ended.sound and not ended.left, ended
        found = Recorded(node, before, line.tree(self.root), ended.told.count("evaluated"))
        for operation, path, site, digest in (told for told in ended.told if told != "evaluated"):
            found.events.append(Event(operation, path, tuple(site)))
            if digest:
                found.passing.add((os.path.relpath(path, self.root), digest))
        return found

    def points(self, every: bool, stages: Collection[str] = QUICK) -> Iterator[Point]:
        seen = set()
        for at, recorded in sorted(enumerate(self.recorded), key=lambda numbered: QUICK.index(numbered[1].node[0])):
            if recorded.node[0] not in stages:
                continue
            for event in recorded.events:
                site = event.site if every else event.site[:1]
                for fault in _faults(event.operation):
                    # What is there after one event is what is there before the next.
                    rare = not every and fault in ("after", "denied", "broken")
                    rare = rare and (event.operation, fault) != ("unlink", "denied")  # mostly in spite of, not always
                    point = (recorded.node[0] if every else "", event.operation, () if rare else site, fault)
                    if point not in seen:
                        seen.add(point)
                        yield Point(at, recorded.node, event.operation, site, fault)

    def tried(self, point: Point) -> list[str]:
        """What was wrong."""
        recorded = self.recorded[point.at]
        line.copied(self._kept(point.at), self.root)
        ended = self._disturbed(point)
        found = list(self._ended(point, ended)) + [f"is left running: {process}" for process in ended.left]
        found += self._visible(recorded)
        found += line.exports_problems(self.root)
        if point.fault == "full":  # who may not write may not remove either
            found += [f"{path} is left" for path in line.tree(self.root) if "/.sandhi-" in path]
        scored = line.lines(self.root) - line.lines(self._kept(point.at))
        again = forked(
            self.folder,
            lambda tell: line.run(self.pool, self.root, recorded.node, lambda model, seconds: tell("evaluated")),
        )
        if not again.sound:
            found.append(f"the rerun failed: {again.error or again.crash}")
        if scored + again.told.count("evaluated") != recorded.scored:
            found.append(f"{again.told.count('evaluated')} of {recorded.scored} scored again, {scored} were there")
        return found + line.differences(recorded.after, line.tree(self.root))

    def _disturbed(self, point: Point) -> Ended:
        def work(tell: Callable[[Any], None]) -> None:
            watch(self.root, _deciding(point))
            line.run(self.pool, self.root, point.node, lambda model, seconds: None)

        return forked(self.folder, work)

    def _ended(self, point: Point, ended: Ended) -> Iterator[str]:
        if point.fault not in ERRORS:
            if not ended.killed:
                yield f"was not killed: {ended}"
        elif ended.crash is not None or ended.killed:
            yield f"ended otherwise than with a clear error: {ended.crash}"
        elif ended.error is None:
            if point.operation not in ("unlink", "rmdir", "fsync", "chmod"):
                yield "no error"
        elif not _clear(ended.error, point.fault):
            yield f"no clear error: {ended.error}"

    def _visible(self, recorded: Recorded) -> Iterator[str]:
        """Files with a final name are whole: of before, of after, or as they were for a while in between."""
        whole = {(path, digest) for known in (recorded.before, recorded.after) for path, (_, digest) in known.items()}
        whole |= recorded.passing
        for path, (_, digest) in line.tree(self.root).items():
            if any(part.startswith(".") for part in Path(path).parts) or (path, digest) in whole:
                continue
            log = self.root / path
            good = self._kept(len(self.recorded)) / path  # of the next node: made when all are recorded
            if path.startswith("scores/") and good.read_bytes().startswith(log.read_bytes()):
                continue  # a line may be torn: it is dropped
            yield f"{path} is half-made"
        for path in recorded.before.keys() & recorded.after.keys():
            if not (self.root / path).exists():
                yield f"{path} is gone"


def _faults(operation: str) -> Iterator[Fault]:
    for fault in get_args(Fault):
        if fault == "torn" and operation != "write":
            continue
        if operation not in REACHES.get(fault, (operation,)):
            continue
        yield fault


def _deciding(point: Point) -> Callable[[Event], Verdict]:
    reached = False

    def decide(event: Event) -> Verdict:
        nonlocal reached
        here = event.operation == point.operation and event.site[: len(point.site)] == point.site
        reached = reached or here
        if point.fault in ERRORS:
            if reached and event.operation in REACHES[point.fault]:
                number = ERRORS[point.fault]
                # As the system does: calls by path name it, calls by handle do not.
                named = [] if event.operation in ("write", "fsync") else [event.path]
                return OSError(number, os.strerror(number), *named)
            return None
        return point.fault if here else None  # type: ignore[return-value]

    return decide


def _clear(error: dict[str, Any], fault: Fault) -> bool:
    free = fault != "full" or "bytes are free" in error["message"]
    helps = "its disk fails" in error["remedy"] if fault == "broken" else bool(error["remedy"])
    return bool(error["file"]) and os.strerror(ERRORS[fault]) in error["message"] and free and helps


def _hidden(root: Path, path: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--stages", nargs="+", choices=QUICK, default=QUICK)
    arguments = parser.parse_args()
    sweep = Sweep(arguments.folder)
    line.copied(sweep.root, sweep._kept(len(sweep.recorded)))
    for point in sweep.points(arguments.every, arguments.stages):
        begun = time.monotonic()
        wrong = sweep.tried(point)
        shown = {"node": point.node, "operation": point.operation, "site": point.site, "fault": point.fault}
        print(json.dumps(shown | {"wrong": wrong, "seconds": round(time.monotonic() - begun, 2)}), flush=True)
    shutil.rmtree(sweep.root)


if __name__ == "__main__":
    main()
