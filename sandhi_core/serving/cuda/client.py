"""What an engine does: attach to the owner of its GPU and take shared tensors from its memory.

    held = attach(Path("/run/user/1000/sandhi-0.sock"), manifest.digest, "legal", digests, device=0)
    weight = held.tensor("model.layers.0.mlp.up_proj.weight")

The tensors are read-only views of the owner's memory: they take none of the engine's. If the owner dies, `alive` turns
false and `died` is called; what is mapped stays as it is and can be used on, because the driver counts the users of
physical memory (cuMemRelease, cuMemUnmap) and this process is one. A new owner holds the tensors a second time until
the engines of the old one have ended.
"""

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread, current_thread

from torch import Tensor

from sandhi_core.checkpoints.checkpoint import tensor_digest
from sandhi_core.checkpoints.safetensors_file import DTYPES
from sandhi_core.errors import ProofError, ServingError
from sandhi_core.serving.cuda import memory, protocol
from sandhi_core.serving.cuda.driver import READ, Driver
from sandhi_core.serving.cuda.protocol import Ask, Given, Lent
from sandhi_core.serving.mapped import Digests, drawn

_RESTART = "end the owner and start it again"


class Attached:
    """The shared tensors of one model on this device, for one rank."""

    def __init__(
        self,
        connection: socket.socket,
        model: str,
        given: Given,
        mapping: memory.DeviceMapping,
        died: Callable[[], None] | None,
    ) -> None:
        self.model = model
        self.tensors: Mapping[str, Lent] = given.tensors
        self._connection = connection
        self._mapping: memory.DeviceMapping | None = mapping
        self._bytes: Tensor | None = mapping.bytes()
        self._died = died
        self._gone = Event()
        self._watching = Thread(target=self._watch, name="sandhi-owner", daemon=True)
        self._watching.start()

    @property
    def alive(self) -> bool:
        """Whether the owner is there, as far as this process has noticed (within milliseconds)."""
        return not self._gone.is_set()

    def tensor(self, name: str) -> Tensor:
        """The rank's slice of a shared tensor, on the device, which nobody may write to. It keeps the mapping, also
        after `close`.

        Raises ServingError where the model shares no tensor of this name, and after `close`.
        """
        if self._bytes is None:
            raise self._wrong("the engine has closed its connection to the owner", name, "attach again")
        lent = self.tensors.get(name)
        if lent is None:
            raise self._wrong("is not shared: the owner does not hold it", name, "take it from the model's own files")
        held = self._bytes[lent.offset : lent.offset + lent.nbytes]
        return held.view(DTYPES[lent.dtype]).reshape(lent.shape)

    def check(self, how: Digests = "full") -> None:
        """Copy tensors back from the device and hold them to the digests that the owner gave. `sampled`: one in 32, at
        least one, each as a whole: the same at every start.

        Raises ProofError for the first tensor, by name, that is another.
        """
        assert self._mapping is not None
        for name in drawn(self.tensors, self.model, how):
            lent = self.tensors[name]
            found = tensor_digest(lent.dtype, lent.shape, self._mapping.read(lent.offset, lent.nbytes))
            if found != lent.part:
                raise ProofError(
                    f"is not in the owner's memory: the digest there is {found}, {lent.part} is expected",
                    model=self.model,
                    tensor=name,
                    remedy=_RESTART,
                )

    def close(self) -> None:
        """Leave the owner. The memory is unmapped when the last tensor of it is forgotten."""
        self._died = None
        self._bytes = self._mapping = None
        with suppress(OSError):  # the owner was faster
            self._connection.shutdown(socket.SHUT_RDWR)
        if current_thread() is not self._watching:  # but in `died`
            self._watching.join()
        self._connection.close()

    def _watch(self) -> None:
        with suppress(OSError):  # a reset is an end too
            while self._connection.recv(1):
                pass
        self._gone.set()
        if (died := self._died) is not None:
            died()

    def _wrong(self, message: str, tensor: str, remedy: str) -> ServingError:
        return ServingError(message, model=self.model, tensor=tensor, remedy=remedy, code="not-held")


def attach(
    path: Path,
    manifest: str,
    model: str,
    digests: Mapping[str, str],
    *,
    device: int = 0,
    size: int = 1,
    rank: int = 0,
    check: Digests = "sampled",
    died: Callable[[], None] | None = None,
    driver: Driver | None = None,
) -> Attached:
    """Attach to the owner that listens at `path`.

    `manifest` is the digest of the export's manifest, `digests` what that says of every shared tensor of the model;
    `device` the number of the GPU in this process, `size` and `rank` those of tensor parallelism. `died` is called
    once, in a thread of its own, when the owner is gone. `driver`: another than this machine's.

    Raises ServingError where there is no owner, or another user's, or one of another export, device or rank, or of
    another version; ProofError where a tensor is not what the manifest says, by name with both digests.
    """
    target = memory.Device(driver or Driver.load(), device)
    connection = _connected(path)
    try:
        _, user = protocol.peer(connection)
        protocol.require_same_user(user, "owner")
        given, descriptor = _asked(
            connection, path, Ask(manifest=manifest, model=model, device=target.uuid, size=size, rank=rank)
        )
        try:
            _require(model, given, digests)
            held = target.imported(descriptor, given.nbytes)
        finally:
            os.close(descriptor)
        try:
            mapping = held.map(READ)
        finally:
            held.release()  # the mapping keeps the memory
        connection.settimeout(None)
        attached = Attached(connection, model, given, mapping, died)
    except BaseException:
        connection.close()
        raise
    try:
        attached.check(check)
    except BaseException:
        attached.close()
        raise
    return attached


def _connected(path: Path) -> socket.socket:
    protocol.require_address(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(protocol.TIMEOUT)
    try:
        connection.connect(os.fspath(path))
    except OSError as error:
        connection.close()
        raise _absent(path, f"no owner answers there: {error.strerror or error}") from None
    return connection


def _asked(connection: socket.socket, path: Path, ask: Ask) -> tuple[Given, int]:
    try:
        protocol.send_ask(connection, ask)
        return protocol.receive_answer(connection)
    except OSError as error:
        raise _absent(path, f"the owner there does not answer: {error.strerror or error}") from None


def _require(model: str, given: Given, digests: Mapping[str, str]) -> None:
    for name in sorted(digests.keys() | given.tensors.keys()):
        expected, lent = digests.get(name), given.tensors.get(name)
        found = None if lent is None else lent.digest
        if found != expected:
            message = f"the owner holds it with digest {found}, {expected} is expected"
            raise ProofError(message, model=model, tensor=name, remedy=_RESTART)


def _absent(path: Path, reason: str) -> ServingError:
    remedy = "start one: python -m sandhi_core.serving.cuda.owner EXPORT --device N --socket PATH"
    return ServingError(reason, file=str(path), remedy=remedy, code="owner-absent")
