"""How a command ends: one answer on standard output, what failed on standard error, one exit status."""

import io
import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

from sandhi_core.errors import Problem, SandhiError, UsageError

ENDINGS = frozenset({signal.SIGINT, signal.SIGTERM})
STOPPED = 130
GOES_ON = "what was finished is kept, the same command goes on from there"


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


def failure(error: BaseException, stopped: bool, after: str = GOES_ON) -> tuple[list[Problem], int]:
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


class UndeliveredError(Exception):
    """The answer cannot be written: its reader has gone away, which is nothing to tell, or the disk is full."""


class Answer:
    """Standard output of a command, for what it answers alone. `given`: whether anything was."""

    def __init__(self, write: Callable[[str], object], as_json: bool, terminal: bool = False) -> None:
        self.given = False
        self._write, self._as_json, self._terminal = write, as_json, terminal

    def __call__(self, document: Any, show: Callable[[], object]) -> None:
        """Answer with a document, where --json asks for one, or with what `show` prints for people. Raises
        UndeliveredError."""
        if self._as_json:
            return self.document(document)
        page = _Page(self._terminal)
        with redirect_stdout(page):
            show()
        self.text(page.getvalue())

    def refuse(self, problems: Sequence[Problem]) -> None:
        """A document of what failed, where --json asks for one and none was given. Raises UndeliveredError."""
        if self._as_json and not self.given:
            found = [problem.model_dump(mode="json") for problem in problems]
            self.document({"ok": False, "problems": found})

    def document(self, document: Any) -> None:
        """Answer with a document, asked for or not. Raises UndeliveredError."""
        self.text(json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n")

    def text(self, text: str) -> None:
        self.given = True
        try:
            self._write(text)
        except BrokenPipeError:
            raise UndeliveredError from None
        except OSError as error:
            raise UndeliveredError(f"error: the answer cannot be written: {error.strerror}") from None


class _Page(io.StringIO):
    """What is printed for people; coloured where a terminal will show it."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def write_all(descriptor: int, text: str) -> None:
    """Names of files that are no text keep their bytes. Raises OSError."""
    data = memoryview(text.encode(errors="surrogateescape"))
    while data:
        data = data[os.write(descriptor, data) :]
