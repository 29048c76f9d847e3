from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from torchweft.launch.control import ControlSocket


@pytest.fixture
def ends() -> Iterator[tuple[ControlSocket, ControlSocket]]:
    ours, theirs = (ControlSocket(end) for end in socket.socketpair())
    with contextlib.closing(ours), contextlib.closing(theirs):
        yield ours, theirs


Ends = tuple[ControlSocket, ControlSocket]


def test_a_message_larger_than_the_connection_holds_arrives_whole(ends: Ends) -> None:
    ours, theirs = ends
    message = {"text": "x" * (4 << 20)}
    sender = threading.Thread(target=ours.send, args=(message,))
    sender.start()
    received = []
    while not received:
        received = theirs.receive()
    sender.join()
    assert received == [message]


def test_descriptors_belong_to_their_message(ends: Ends) -> None:
    ours, theirs = ends
    pipes = [os.pipe() for _ in range(2)]
    for number, (_, write_end) in enumerate(pipes):
        ours.send({"number": number}, [write_end])
        os.close(write_end)
    received = []
    while len(received) < 2:
        received += theirs.receive()
    for message, (read_end, _) in zip(received, pipes, strict=True):
        (write_end,) = theirs.take_descriptors(1)
        os.write(write_end, b"%d" % message["number"])
        os.close(write_end)
        assert os.read(read_end, 10) == b"%d" % message["number"]
        os.close(read_end)


def test_descriptors_that_nobody_takes_are_closed(ends: Ends) -> None:
    ours, theirs = ends
    read_end, write_end = os.pipe()
    ours.send({}, [write_end])
    os.close(write_end)
    theirs.receive()
    theirs.close()
    assert os.read(read_end, 1) == b""
    os.close(read_end)
