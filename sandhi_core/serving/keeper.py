"""Keeps one server and everything that it starts, and ends all of it when whoever started the keeper is gone.

    python -m sandhi_core.serving.keeper GRACE COMMAND [ARGUMENT ...]

The keeper runs until the command ends, or standard input ends (its other end is held by whoever started it, so that the
kernel closes it however that process dies), or SIGTERM comes. Then the command gets SIGTERM and GRACE seconds; what is
left after that, or was left behind by a command that ended itself, is killed. It exits as the command did: with its
status, or 128 + the signal that ended it; 126 where the kernel does not let it keep anything, 127 where there is no
such command.

Being a "child subreaper" (prctl(2)), the keeper becomes the parent of whatever its descendants leave behind, also in
sessions of their own: none can get out of its sight. Only the standard library is imported: it starts in no time.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)
_TICK = 0.05  # seconds
_SETTLED = 10.0  # seconds that killed processes get to be gone; one in uninterruptible sleep would take for ever


def main(arguments: list[str]) -> int:
    grace, command = float(arguments[0]), arguments[1:]
    try:
        _prctl(_SET_CHILD_SUBREAPER, 1)
    except OSError as error:
        print(f"nothing is started that could not be ended: {error}", file=sys.stderr)
        return 126
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whoever started us may have held signals back
    signals, ask = os.pipe()
    os.set_blocking(ask, False)
    signal.set_wakeup_fd(ask)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _noted)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_keeper)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    except subprocess.SubprocessError:  # all that is told of an exception between fork and exec
        print("nothing is started that could outlive its keeper: prctl was refused", file=sys.stderr)
        return 126
    while process.poll() is None and not _told_to_end(signals):
        _reap(process.pid)
    _end(process, grace)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _noted(number: int, frame: object) -> None:
    """The wake-up descriptor has told already."""


def _die_with_keeper() -> None:
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")


def _told_to_end(signals: int) -> bool:
    """Sleeps until something happens; whether that means to end."""
    ready = select.select([sys.stdin.fileno(), signals], [], [])[0]
    if signals in ready and {signal.SIGTERM, signal.SIGINT} & set(os.read(signals, 64)):
        return True
    return sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 64)


def _end(process: "subprocess.Popen[bytes]", grace: float) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    deadline = time.monotonic() + _SETTLED
    while found := descendants(os.getpid()):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        _reap(process.pid)
        if time.monotonic() > deadline:
            return
        time.sleep(_TICK)
    process.poll()


def _reap(command: int) -> None:
    """Collects what was left to the keeper; the command itself is collected by its Popen."""
    for pid in _children().get(os.getpid(), ()):
        if pid != command:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, parents first."""
    children, found = _children(), [pid]
    for parent in found:
        found += children.get(parent, ())
    return found[1:]


def _children() -> dict[int, list[int]]:
    """Processes by their parent (proc(5), /proc/PID/stat)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has just ended
                # The name of the program, in parentheses, may hold anything.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    return children


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
