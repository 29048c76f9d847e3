"""Orders of the steps of two threads that use one plain stream."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from tests.unit.engine.io.reading import not_main  # noqa: F401
from torchweft.engine.io.link import PlainStream

pytestmark = pytest.mark.usefixtures("not_main")


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def before_the_release(stream: PlainStream, step: Callable[[], object]) -> None:
    """Has another thread's step come when the writer has found nothing more in the queue."""
    write_queue, steps = stream._write_queue, [step]

    def write_then_step() -> bool:
        is_written = write_queue()
        if steps:
            steps.pop()()
        return is_written

    stream._write_queue = write_then_step  # type: ignore[method-assign]


def test_the_writer_takes_along_what_comes_before_it_ends(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = sockets
    stream = PlainStream(ours, keeps=False)
    before_the_release(stream, lambda: stream.write([b"second"]))
    assert stream.write([b"first "])
    assert theirs.recv(100) == b"first second"
    assert not stream.queued


def test_nothing_is_written_after_the_end(sockets: tuple[socket.socket, socket.socket]) -> None:
    """A writer may have looked whether the link has ended just before it ends."""
    ours, theirs = sockets
    stream = PlainStream(ours, keeps=False)
    stream.close()
    with pytest.raises(BrokenPipeError):
        stream.write([b"too late"])
    assert not stream.is_writing
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)


def test_a_session_without_a_connection_keeps_what_comes_before_it_has_one(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = sockets
    stream = PlainStream(ours, keeps=True)
    assert stream.write([b"before "])
    stream.is_broken = True
    before_the_release(stream, lambda: stream.write([b"later"]))
    assert stream.write([b"meanwhile "])
    assert theirs.recv(100) == b"before "
    stream.resume(3)
    assert stream.write(())
    assert theirs.recv(100) == b"ore meanwhile later"
    assert stream.position == len(b"before meanwhile later")
