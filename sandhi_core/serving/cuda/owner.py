"""The process that holds an export's shared tensors on one GPU, for all engines there.

    python -m sandhi_core.serving.cuda.owner EXPORT --device 0 --socket PATH [--tensor-parallel N --rank R]

Holds every file to its digest, copies the rank's slices to the device, and prints one line of JSON when engines can
attach: `{"socket", "pid", "manifest", "device", "size", "rank", "tensors", "bytes", "reserved"}`. Who comes and goes it
says on standard error. It ends at SIGTERM or SIGINT (status 0; 130 while it still prepares), removes its socket and
releases the memory, which is free once the last engine has let go of it. Other status: 1 something is wrong with the
export, the device or the socket, 2 the command is.
"""

import argparse
import fcntl
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread

from sandhi_core.errors import SandhiError, ServingError
from sandhi_core.serving.cuda import protocol
from sandhi_core.serving.cuda.driver import Driver
from sandhi_core.serving.cuda.holding import DeviceHolding, Wanted
from sandhi_core.serving.cuda.memory import Device


def main(arguments: Sequence[str] | None = None, driver: Driver | None = None) -> int:
    """`driver`: another than this machine's."""
    options = _parser().parse_args(arguments)
    ready = False
    try:
        with _stopping(), ExitStack() as held:
            listener = held.enter_context(address(options.socket))
            holding = held.enter_context(closing(_held(options, driver)))
            listener.listen()  # not before: an engine that comes too early is told at once that nobody is there
            print(json.dumps(_ready(options.socket, holding)), flush=True)
            ready = True
            Readers(holding).serve(listener)
    except KeyboardInterrupt:
        return 0 if ready else 130
    except SandhiError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sandhi_core.serving.cuda.owner",
        description="Hold the shared tensors of an export on one GPU, once for all engines there.",
        epilog="example: python -m sandhi_core.serving.cuda.owner exports/demo/f90c159e8b000269 --device 0 "
        "--socket /run/user/1000/sandhi-0.sock",
    )
    parser.add_argument("export", type=Path, help="directory that holds sandhi.json")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="number of the GPU (default 0)")
    parser.add_argument("--socket", type=Path, required=True, metavar="PATH", help="where engines attach")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="number of ranks (default 1)")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="whose slices to hold (default 0)")
    return parser


def _held(options: argparse.Namespace, driver: Driver | None) -> DeviceHolding:
    wanted = Wanted.of(options.export, options.tensor_parallel, options.rank)
    return DeviceHolding(wanted, Device(driver or Driver.load(), options.device))


def _ready(path: Path, holding: DeviceHolding) -> dict[str, object]:
    return {
        "socket": str(path),
        "pid": os.getpid(),
        "manifest": holding.manifest,
        "device": holding.device.uuid,
        "size": holding.size,
        "rank": holding.rank,
        "tensors": len(holding.plan.places),
        "bytes": holding.plan.held,
        "reserved": holding.nbytes,
    }


class Readers:
    """The engines that are attached; a thread each, which sleeps until the engine is gone."""

    def __init__(self, holding: DeviceHolding) -> None:
        self._holding = holding
        self._attached: dict[socket.socket, str] = {}
        self._changing = Lock()

    def serve(self, listener: socket.socket) -> None:
        """Until the process is told to end."""
        while True:
            try:
                connection, _ = listener.accept()
                # They end with the process: a reader notices an owner's end by that.
                Thread(target=self._serve, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError) as error:  # no more descriptors or threads: those attached stay
                _say(f"an engine could not attach: {error}")
                time.sleep(1)

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # it went away, or said nothing for too long
            connection.settimeout(protocol.TIMEOUT)
            try:
                process, user = protocol.peer(connection)
                protocol.require_same_user(user, "engine")
                ask = protocol.receive_ask(connection)
                given = self._holding.given(ask)
            except ServingError as error:
                said = error.problem
                message = said.message if said.model is None else f"model {said.model}: {said.message}"
                refused = protocol.Refused(code=said.code, message=message, remedy=said.remedy)
                protocol.send_answer(connection, refused)
                return
            protocol.send_answer(connection, given, self._holding.descriptor)
            self._stay(connection, f"process {process} with model {ask.model}")

    def _stay(self, connection: socket.socket, who: str) -> None:
        self._note(connection, who)
        try:
            connection.settimeout(None)
            while connection.recv(1):
                pass
        finally:
            self._note(connection, None)

    def _note(self, connection: socket.socket, who: str | None) -> None:
        with self._changing:
            if who is None:
                event = f"{self._attached.pop(connection)} left"
            else:
                self._attached[connection] = who
                event = f"{who} attached"
            _say(f"{event}; attached now: {len(self._attached)}")


def _say(text: str) -> None:
    with suppress(OSError):  # nobody may listen any more, which is no reason to let engines go
        print(text, file=sys.stderr, flush=True)


@contextmanager
def address(path: Path) -> Iterator[socket.socket]:
    """A socket at a path that no other owner has, which only this user can connect to; gone afterwards.

    Raises ServingError where the path is too long, its directory is missing or not ours to write, something other than
    a socket is there, or another owner is. The socket of an owner that was killed is replaced.
    """
    protocol.require_address(path)
    with _alone(path), closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise _unusable(path, "something that is no socket is there")
            path.unlink()  # left by an owner that was killed: a live one would hold the lock
        mask = os.umask(0o177)
        try:
            listener.bind(os.fspath(path))
        except OSError as error:
            raise _unusable(path, f"no socket can be made: {error.strerror}") from None
        finally:
            os.umask(mask)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds PATH.lock, which the kernel lets go of however the process ends."""
    lock = path.with_name(path.name + ".lock")
    while True:
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unusable(path, f"its lock {lock.name} cannot be made: {error.strerror}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ServingError(
                "another owner is there",
                file=str(path),
                remedy="attach engines to that one, end it, or give this one another --socket",
                code="owner-exists",
            ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), lock.stat()):
                break
        os.close(handle)  # who had it last has just removed it
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _unusable(path: Path, reason: str) -> ServingError:
    remedy = "give a path in an existing directory that belongs to this user, such as /run/user/UID"
    return ServingError(reason, file=str(path), remedy=remedy, code="socket-path")


@contextmanager
def _stopping() -> Iterator[None]:
    """SIGTERM ends the process as SIGINT does, once: what follows does not disturb the tidying up."""

    def stop(number: int, frame: object) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


if __name__ == "__main__":
    sys.exit(main())
