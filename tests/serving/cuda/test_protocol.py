"""What owner and engine say to each other."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.errors import ServingError
from sandhi_core.serving.cuda.protocol import (
    VERSION,
    Ask,
    Given,
    Lent,
    Refused,
    peer,
    receive_answer,
    receive_ask,
    send_answer,
    send_ask,
)

ASK = Ask(manifest="m", model="legal", device="d", size=2, rank=1)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        one.settimeout(60)
        other.settimeout(60)
        yield one, other


def lent(tensors: int) -> Given:
    one = Lent(offset=256, nbytes=8, dtype="BF16", shape=(2, 2), digest="a" * 64, part="b" * 64)
    return Given(manifest="m", device="d", nbytes=2 << 20, tensors={f"{n}.weight": one for n in range(tensors)})


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_question(ends: tuple[socket.socket, socket.socket]) -> None:
    send_ask(ends[0], ASK)
    assert receive_ask(ends[1]) == ASK
    assert peer(ends[1]) == (os.getpid(), os.geteuid())


@pytest.mark.parametrize("tensors", [0, 1, 5000])  # the last takes several reads
def test_an_answer_brings_a_descriptor(ends: tuple[socket.socket, socket.socket], tensors: int) -> None:
    sent = os.memfd_create("memory")
    sending = Thread(target=send_answer, args=(ends[0], lent(tensors), sent))
    sending.start()
    answer, received = receive_answer(ends[1])
    sending.join()
    assert answer == lent(tensors)
    assert os.path.sameopenfile(sent, received) and not os.get_inheritable(received)
    os.close(sent)
    os.close(received)


def test_a_refusal_is_raised_as_it_was_said(ends: tuple[socket.socket, socket.socket]) -> None:
    send_answer(ends[0], Refused(code="device-differs", message="another device", remedy="take that one"))
    with pytest.raises(ServingError, match=r"^error: device-differs: another device \(take that one\)$"):
        receive_answer(ends[1])


def test_an_answer_without_a_descriptor(ends: tuple[socket.socket, socket.socket]) -> None:
    send_answer(ends[0], lent(1))
    with pytest.raises(ServingError, match="0 descriptors came with it"):
        receive_answer(ends[1])


@pytest.mark.parametrize("line", [b'{"kind": "given", "protocol": 7}\n', b"{}\n", b"no\n"])
def test_no_descriptor_is_left_open(ends: tuple[socket.socket, socket.socket], line: bytes) -> None:
    memory = os.memfd_create("memory")
    before = descriptors()
    socket.send_fds(ends[0], [line], [memory])
    with pytest.raises(ServingError):
        receive_answer(ends[1])
    socket.send_fds(ends[0], [b"half a line"], [memory])
    ends[0].close()
    with pytest.raises(ConnectionResetError):
        receive_answer(ends[1])
    assert descriptors() == before - 1  # the end that was closed
    os.close(memory)


def test_another_version_is_named_before_anything_else_is_read(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(b'{"protocol": 2, "else": []}\n')
    with pytest.raises(ServingError, match=f"protocol-differs: .* version 2 .* this one version {VERSION}"):
        receive_ask(ends[1])


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "protocol", "x"]), inner),
    max_leaves=8,
)


@given(line=st.binary(max_size=50).filter(lambda b: b"\n" not in b) | JSON.map(lambda v: json.dumps(v).encode()))
def test_nonsense_is_an_error_of_ours(line: bytes) -> None:
    for receive in (receive_ask, receive_answer):
        one, other = socket.socketpair(socket.AF_UNIX)
        with one, other, pytest.raises(ServingError):
            one.sendall(line + b"\n")
            receive(other)


def test_more_descriptors_than_one_are_refused_and_closed(ends: tuple[socket.socket, socket.socket]) -> None:
    memories = [os.memfd_create("memory") for _ in range(4)]
    before = descriptors()
    socket.send_fds(ends[0], [lent(1).model_dump_json().encode() + b"\n"], memories)
    with pytest.raises(ServingError, match="protocol-garbled"):
        receive_answer(ends[1])
    assert descriptors() == before
    for memory in memories:
        os.close(memory)
