"""Ports for servers that take a while until they listen."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

HOST = "127.0.0.1"


@contextmanager
def reserved(count: int) -> Iterator[list[int]]:
    """So many ports of this machine that nobody who asks for a free one is given until the block ends. Whoever names
    one can bind it, with SO_REUSEADDR as servers do. Raises OSError where there are none left."""
    with ExitStack() as held:
        yield [_port(held.enter_context(socket.socket())) for _ in range(count)]


def _port(probe: socket.socket) -> int:
    probe.bind((HOST, 0))
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only now: asked before, it might be another's too
    port: int = probe.getsockname()[1]
    return port
