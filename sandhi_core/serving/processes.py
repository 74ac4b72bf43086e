"""Servers as processes: started, waited for, and ended whatever happens to whoever started them. Linux only."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from sandhi_core.errors import ServingError
from sandhi_core.serving import keeper as keeper_module
from sandhi_core.serving.keeper import descendants

GRACE = 15.0  # seconds that a server gets to end by itself
_MARGIN = 15.0  # seconds that its keeper gets beyond that, and again once it is killed
_TICK = 0.1  # seconds between two looks at a server that is not ready
_ASKING = 5.0  # seconds for one answer of a server
QUIET: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""The environment of engines that fetch nothing and report to nobody: what they serve lies here."""
_SHOWN = 12  # last lines of a log that an error shows


class Server:
    """One running server: its command, everything that this starts, its log.

    `url` is its address without a path (with a unix socket: that); `log` holds what it writes. A context manager: its
    end is the server's, also on KeyboardInterrupt. A server does not outlive whoever started it, even one that is
    killed (see keeper.py).
    """

    def __init__(
        self, name: str, url: str, health: "str | Path", log: Path, keeper: "subprocess.Popen[bytes]", grace: float
    ):
        self.name, self.url, self.log = name, url, log
        self._health, self._keeper, self._grace = health, keeper, grace

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        port: int | None,
        log: Path,
        host: str = "127.0.0.1",
        health: str | Path = "/health",
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
        grace: float = GRACE,
    ) -> "Server":
        """Start `command` in `directory` (by default this process's), which will listen on `port` of `host`, or with
        `health` a Path and no port on that socket once it is ready; returns at once.

        `log` is written anew. `environment` is added to this process's. `grace`: seconds between SIGTERM and SIGKILL
        at its end. Raises ServingError where the port is taken, and OSError where the log cannot be written.
        """
        if port is not None:
            require_free(name, host, port)
        with log.open("wb") as output:
            keeper = subprocess.Popen(
                # By its file: it needs nothing but the standard library, and the server's PYTHONPATH is the server's.
                [sys.executable, "-I", keeper_module.__file__, str(grace), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=os.environ | dict(environment or {}),
                start_new_session=True,  # Ctrl-C reaches only us
            )
        url = f"unix:{health}" if port is None else f"http://{shown_host(host)}:{port}"
        return cls(name, url, health, log, keeper, grace)

    def wait_ready(self, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> float:
        """Wait until GET of the health path answers 200, or its socket takes connections; returns the seconds that
        took. `meanwhile` is called again and again: what it raises ends the waiting.

        Raises ServingError where the server ends before that, or is not ready within `timeout` seconds; both show
        the last lines of its log, and leave what runs to `stop`.
        """
        began = time.monotonic()
        while True:
            meanwhile()
            self.require_alive()
            if self._healthy():
                self.require_alive()  # else it was a stranger who answered
                return time.monotonic() - began
            if time.monotonic() - began >= timeout:
                raise ServingError(
                    f"was not ready within {timeout:g} seconds{self._said()}",
                    model=self.name,
                    file=str(self.log),
                    remedy="see its log; give it more time, or free processors and memory",
                )
            time.sleep(_TICK)

    def require_alive(self) -> None:
        """Raises ServingError, with the last lines of its log, where the server has ended."""
        if (status := self.status()) is not None:
            raise ServingError(
                f"its server ended {_how(status)}{self._said()}",
                model=self.name,
                file=str(self.log),
                remedy="resolve what the log says, then start it again",
            )

    def status(self) -> int | None:
        """None while it runs; then its exit status, or 128 + the signal that ended it."""
        return self._keeper.poll()

    def get(self, path: str, timeout: float) -> bytes:
        """What the server answers to GET of a path within `timeout` seconds. Raises OSError unless it is a 200."""
        with _direct.open(self.url + path, timeout=timeout) as answer:
            body: bytes = answer.read()
            return body

    def pids(self) -> tuple[int, ...]:
        """Every process of the server, the one that was started first; none once it has ended."""
        return tuple(descendants(self._keeper.pid)) if self.status() is None else ()

    def ask(self) -> None:
        """Have the server end, without waiting for it; it does even if we do not live to see it."""
        assert self._keeper.stdin is not None
        with suppress(OSError):
            self._keeper.stdin.close()

    def stop(self) -> None:
        """End the server and everything it started; returns when all of it is gone, or after a bounded time: the kernel
        may take longer to end a process that waits for a device."""
        self.ask()
        try:
            self._keeper.wait(self._grace + _MARGIN)
        except subprocess.TimeoutExpired:
            for pid in (*descendants(self._keeper.pid), self._keeper.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._keeper.wait(_MARGIN)

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _healthy(self) -> bool:
        try:
            if isinstance(self._health, Path):
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(_ASKING)
                    probe.connect(str(self._health))
            else:
                self.get(self._health, _ASKING)
        except (OSError, ValueError):  # nobody listens yet, or it answers that it is not ready
            return False
        return True

    def _said(self) -> str:
        lines = last_lines(self.log)
        return "; its log ends:\n" + "\n".join(f"  {line}" for line in lines) + "\n" if lines else "; its log is empty"


def stop_all(servers: Iterable[Server]) -> None:
    """Stop servers, each as `Server.stop` does, all at the same time."""
    running = list(servers)
    for server in running:
        server.ask()
    for server in running:
        server.stop()


def _how(status: int) -> str:
    """How a process ended, by its status as a shell has it: above 128 may be a signal, or just a number."""
    known = signal.valid_signals()
    return f"by signal {signal.Signals(status - 128).name}" if status - 128 in known else f"with status {status}"


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # servers are here: no proxy between


def last_lines(log: Path, count: int = _SHOWN) -> list[str]:
    """The last lines of a log that are not blank."""
    with log.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 64 * 1024, 0))
        text = file.read().decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def shown_host(host: str) -> str:
    """Where to reach, from this machine, what listens on `host`; as URLs spell it."""
    here = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{here}]" if ":" in here else here


def require_free(name: str, host: str, port: int) -> None:
    """Raises ServingError where `port` of `host` cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: connections may linger
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise ServingError(
                f"port {port} of {host} is in use already" if taken else f"cannot listen on {host}:{port}: {error}",
                model=name,
                remedy="end what listens there, or choose other ports"
                if taken
                else "give an address of this machine, and a port that you may listen on",
            ) from None


def transformers_command(
    directory: Path, port: int, *, python: str = "python3", host: str = "127.0.0.1", extra: Sequence[str] = ()
) -> tuple[str, ...]:
    """The command of `transformers serve` (5.24) for one exported model, the only one it answers with, by the name
    `directory` just as it is written here: a relative one, with the server started beside it, is the model's own name.
    It leaves residuals out, so give it no model that has them."""
    module = [python, "-m", "transformers.cli.transformers", "serve", str(directory)]
    return (*module, "--host", host, "--port", str(port), *extra)
