"""How a command ends: one answer on standard output, what failed on standard error, one exit status."""

import os
import signal
import sys
from collections.abc import Callable

from sandhi_core.errors import Problem, SandhiError, UsageError

ENDINGS = frozenset({signal.SIGINT, signal.SIGTERM})
STOPPED = 130
_GOES_ON = "what was finished is kept, the same command goes on from there"


def signal_noted() -> Callable[[], bool]:
    """Tells whether SIGINT or SIGTERM has come, whoever handled it: where it lands inside a library it may come
    out as that library's own failure."""
    arrived, noted = os.pipe()
    os.set_blocking(arrived, False)
    os.set_blocking(noted, False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.set_wakeup_fd(noted, warn_on_full_buffer=False)

    def stopped() -> bool:
        try:
            return bool(ENDINGS & set(os.read(arrived, 4096)))
        except BlockingIOError:
            return False

    return stopped


def failure(error: BaseException, stopped: bool, after: str = _GOES_ON) -> tuple[list[Problem], int]:
    """What is wrong, and the exit status; `after` says how things are left. With SANDHI_DEBUG set a defect
    is raised again, with its traceback."""
    if stopped or isinstance(error, KeyboardInterrupt):
        return [_problem("stopped", "stopped by Ctrl-C or SIGTERM", after)], STOPPED
    if isinstance(error, SandhiError):
        problems: list[Problem] = getattr(error, "problems", None) or [error.problem]
        return problems, 2 if isinstance(error, UsageError) else 1
    if isinstance(error, OSError):
        file = None if error.filename is None else str(error.filename)
        return [_problem("system", error.strerror or str(error), f"mend that; {after}", file)], 1
    if os.environ.get("SANDHI_DEBUG"):
        raise error
    return [_problem("defect", f"unexpected {type(error).__name__}: {error}", "SANDHI_DEBUG=1 shows where")], 1


def _problem(code: str, message: str, remedy: str, file: str | None = None) -> Problem:
    return Problem(code=code, severity="error", message=message, remedy=remedy, file=file)


def deliver(text: str, status: int, answer: int | None) -> int:
    """Write the answer to a descriptor, or to sys.stdout; a reader that has gone away or a full disk is an exit
    status, not a traceback."""
    try:
        if answer is None:
            sys.stdout.write(text)
        else:
            data = memoryview(text.encode())
            while data:
                data = data[os.write(answer, data) :]
        return status
    except BrokenPipeError:
        return status or 1
    except OSError as error:
        print(f"error: the answer cannot be written: {error.strerror}", file=sys.stderr)
        return 1
