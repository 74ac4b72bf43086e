"""A child of a process that has imported everything already: it is ready in milliseconds, and may be killed."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandhi_core.errors import SandhiError

SECONDS = 1500.0
"""That a child may take; none comes near."""

MARK = "SANDHI_CRASH_CHILD"
"""In the environment of a child, and so of what it starts: its number."""

GRACE = 60.0
"""Seconds in which what a killed process started must have noticed."""


@dataclass(frozen=True)
class Ended:
    """`killed`: by SIGKILL. `told`: what the child told, line by line; `error`: the expected failure it ended with, as
    a problem; `crash`: the traceback of any other; `left`: what it started and outlived it."""

    killed: bool
    told: list[Any]
    error: dict[str, Any] | None
    crash: str | None
    left: list[str]

    @property
    def sound(self) -> bool:
        return not self.killed and self.error is None and self.crash is None


def forked(folder: Path, work: Callable[[Callable[[Any], None]], None]) -> Ended:
    """Run `work` in a child, which tells by the function that it is given; `folder` takes the file of what it told."""
    told = folder / "told.jsonl"
    told.write_bytes(b"")
    pid = os.fork()
    if not pid:
        _child(told, work)
    status = _waited(pid)
    said = [json.loads(line) for line in told.read_text().splitlines()]
    errors = [line["error"] for line in said if isinstance(line, dict) and "error" in line]
    crashes = [line["crash"] for line in said if isinstance(line, dict) and "crash" in line]
    return Ended(
        os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        [line for line in said if not isinstance(line, dict)],
        errors[0] if errors else None,
        crashes[0] if crashes else None if os.WIFSIGNALED(status) or not status else f"status {status}",
        _left(pid),
    )


def _child(told: Path, work: Callable[[Callable[[Any], None]], None]) -> None:
    os.setsid()
    os.environ[MARK] = str(os.getpid())
    handle = os.open(told, os.O_WRONLY | os.O_APPEND)
    write = os.write  # before anything is watched

    def tell(line: Any) -> None:
        write(handle, json.dumps(line).encode() + b"\n")

    try:
        work(tell)
    except SandhiError as error:
        tell({"error": error.problem.model_dump()})
    except BaseException:
        tell({"crash": traceback.format_exc()})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _waited(pid: int) -> int:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("a child did not end")


def _left(child: int) -> list[str]:
    """What a child started that is still running after a while; it is ended."""
    until = time.monotonic() + GRACE
    while (found := _started_by(child)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return list(found.values())


def _started_by(child: int) -> dict[int, str]:
    """What is in the child's session, or has left it but inherited its mark."""
    found, mark = {}, f"{MARK}={child}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            _, _, after = (entry / "stat").read_text().rpartition(") ")
            state, _, _, session = after.split()[:4]
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
            if state != "Z" and (int(session) == child or marked):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has just ended
            continue
    return found
