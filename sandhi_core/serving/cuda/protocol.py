"""What an owner and an engine say to each other over a unix socket, and who may.

The engine sends one line of JSON, `Ask`; the owner answers one, `Given` or `Refused`, and with the first byte of
`Given` a file descriptor of its memory (SCM_RIGHTS, unix(7)). After that neither says anything: the connection stands
for as long as both live, and closes with the first of them, however it ends.
"""

import json
import os
import socket
import struct
from array import array
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from sandhi_core.codes import Code
from sandhi_core.errors import ServingError
from sandhi_core.records import Part

VERSION = 1
TIMEOUT = 10.0
"""Seconds that either side waits for what the other must say at once."""
LONGEST_PATH = 107
"""Bytes of a socket's path: sun_path has 108, one of them a zero (unix(7))."""

_MOST = {"ask": 1 << 16, "answer": 1 << 26}  # bytes of a line
_CHUNK = 1 << 16
_INT = array("i").itemsize
_ROOM = socket.CMSG_SPACE(_INT)  # for one descriptor; the kernel closes what does not fit
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class Ask(Part):
    """Which memory an engine wants: of what export, for which model, on what device, and which rank's."""

    protocol: int = VERSION
    manifest: str
    model: str
    device: str  # UUID
    size: int  # number of tensor-parallel ranks
    rank: int


class Lent(Part):
    """A tensor in the owner's memory. `digest` is the manifest's, of the whole tensor; `part` that of the bytes that
    are here, in the same format: they differ where a rank holds a slice."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    digest: str
    part: str


class Given(Part):
    """Everything that the asked model shares, by tensor name; `nbytes` is the size of the memory."""

    kind: Literal["given"] = "given"
    protocol: int = VERSION
    manifest: str
    device: str
    nbytes: int
    tensors: dict[str, Lent]


class Refused(Part):
    """Why not. The fields of a Problem."""

    kind: Literal["refused"] = "refused"
    code: Code
    message: str
    remedy: str


_ANSWER: TypeAdapter[Given | Refused] = TypeAdapter(Annotated[Given | Refused, Field(discriminator="kind")])


def send_ask(connection: socket.socket, ask: Ask) -> None:
    connection.sendall(ask.model_dump_json().encode() + b"\n")


def receive_ask(connection: socket.socket) -> Ask:
    """Raises ServingError for an engine that speaks otherwise, OSError where it says nothing."""
    line, descriptors = _line(connection, _MOST["ask"])
    _close(descriptors)
    ask: Ask = _understood(line, Ask.model_validate)
    return ask


def send_answer(connection: socket.socket, answer: Given | Refused, descriptor: int | None = None) -> None:
    line = answer.model_dump_json().encode() + b"\n"
    if descriptor is not None:
        sent = socket.send_fds(connection, [line], [descriptor])
        line = line[sent:]
    connection.sendall(line)


def receive_answer(connection: socket.socket) -> tuple[Given, int]:
    """What was asked for, and the descriptor, which is the caller's to close.

    Raises ServingError where the owner refuses, with its reason, or speaks otherwise; OSError where it says nothing.
    """
    line, descriptors = _line(connection, _MOST["answer"])
    try:
        answer = _understood(line, _ANSWER.validate_python)
        if isinstance(answer, Refused):
            raise ServingError(answer.message, remedy=answer.remedy, code=answer.code)
        if len(descriptors) != 1:
            raise _garbled(f"{len(descriptors)} descriptors came with it")
        return answer, descriptors.pop()
    finally:
        _close(descriptors)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them (SO_PEERCRED); the process is 0 where it lies in a
    namespace that this one does not see."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return process, user


def require_same_user(user: int, what: str) -> None:
    """Whoever maps the memory could map it for writing, and whoever gives it decides what is computed: both ends are
    one user's. Raises ServingError."""
    if user != os.geteuid():
        raise ServingError(
            f"the {what} belongs to user {user}, this process to user {os.geteuid()}",
            remedy="run owner and engines as one user",
            code="user-differs",
        )


def require_address(path: Path) -> None:
    """Raises ServingError for a path that no socket can have."""
    if (length := len(os.fsencode(path))) > LONGEST_PATH:
        raise ServingError(
            f"the socket's path has {length} bytes, at most {LONGEST_PATH} are possible",
            file=str(path),
            remedy="give a shorter one, such as /run/user/UID/sandhi-0.sock, or one relative to the working directory",
            code="socket-path",
        )


def _line(connection: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """Up to a line feed, and the descriptors that came along."""
    said = bytearray()
    descriptors: list[int] = []
    try:
        while not said.endswith(b"\n"):
            # Not socket.recv_fds: that of Python 3.11 drops the flags.
            data, ancillary, flags, _ = connection.recvmsg(_CHUNK, _ROOM, socket.MSG_CMSG_CLOEXEC)
            for level, kind, value in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors += array("i", value[: len(value) - len(value) % _INT])
            said += data
            if not data:
                raise ConnectionResetError("it closed the connection")
            if len(said) > most or flags & socket.MSG_CTRUNC:
                raise _garbled("too much came")
    except BaseException:
        _close(descriptors)
        raise
    return bytes(said), descriptors


def _understood(line: bytes, validate: Any) -> Any:
    try:
        said = json.loads(line)
        version = said["protocol"] if said.get("kind") != "refused" else VERSION
    except (ValueError, KeyError, AttributeError, RecursionError):
        raise _garbled("it is no JSON object with a protocol") from None
    if version != VERSION:
        raise ServingError(
            f"the other end speaks version {version} of the owner's protocol, this one version {VERSION}",
            remedy="run owner and engines with one version of Sandhi",
            code="protocol-differs",
        )
    try:
        return validate(said)
    except ValidationError as error:
        first = error.errors()[0]
        raise _garbled(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _garbled(reason: str) -> ServingError:
    remedy = "give the socket of an owner, run with the same version of Sandhi"
    return ServingError(f"what the other end says makes no sense: {reason}", remedy=remedy, code="protocol-garbled")


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
