from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.thread_limits import no_new_threads
from torchweft.engine.channels.transfer_loop import NOTHING, READABLE, WRITABLE, TransferLoop

LIMIT_S = 20.0

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def loop() -> Iterator[TransferLoop]:
    made = TransferLoop("test-loop", 2)
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


def pump_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return sorted(name for name in names if name.startswith("test-loop"))


def test_a_pump_that_gets_no_thread_tries_again_later(
    loop: TransferLoop, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    came = threading.Event()

    def read() -> int:
        came.set()
        return NOTHING

    pair[1].sendall(b"x")
    with (
        no_new_threads(monkeypatch),
        pytest.raises(RuntimeError, match="can't start new thread"),
    ):
        loop.watch(pair[0].fileno(), read, READABLE)
    loop.watch(pair[0].fileno(), read, READABLE)
    assert came.wait(LIMIT_S)


def test_who_waits_for_nothing_is_left_alone_until_armed(loop: TransferLoop, pair: Pair) -> None:
    called = threading.Semaphore(0)

    def handle() -> int:
        called.release()
        return NOTHING

    loop.watch(pair[0].fileno(), handle, WRITABLE)
    assert called.acquire(timeout=LIMIT_S)
    pair[1].sendall(b"x")
    pair[1].shutdown(socket.SHUT_RDWR)  # not even this wakes it
    assert not called.acquire(timeout=0.02)
    loop.arm(pair[0].fileno(), READABLE)
    assert called.acquire(timeout=LIMIT_S)


def test_a_handler_that_fails_ends_nothing_else(
    loop: TransferLoop, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> int:
        raise LookupError("a test")

    loop.watch(pair[0].fileno(), fail, WRITABLE)
    called = threading.Semaphore(0)
    for _ in range(4):  # more often than there are threads
        loop.forget(pair[1].fileno())
        loop.watch(pair[1].fileno(), lambda: called.release() or NOTHING, WRITABLE)
        assert called.acquire(timeout=LIMIT_S)
    loop.close()
    assert "could not be moved" in caplog.text


def test_a_closed_pump_takes_no_connection(loop: TransferLoop, pair: Pair) -> None:
    loop.close()
    with pytest.raises(ConnectionAbortedError):
        loop.watch(pair[0].fileno(), lambda: NOTHING, READABLE)
    assert pump_threads() == []


def test_a_handler_that_has_become_another_connection_s_does_not_arm_it(
    loop: TransferLoop, pair: Pair
) -> None:
    """The connection was closed while its handler ran, and its number was reused."""
    ours, theirs = pair
    came = threading.Event()

    def other() -> int:
        came.set()
        return NOTHING

    def former() -> int:
        # Another thread closes the connection, and watches a new one with its number.
        loop.forget(ours.fileno())
        loop.watch(ours.fileno(), other, WRITABLE & ~select.EPOLLOUT)
        return WRITABLE

    loop.watch(ours.fileno(), former, READABLE)
    theirs.sendall(b"x")
    # The other connection is writable, but it does not wait for that.
    assert not came.wait(0.05)
    loop.arm(ours.fileno(), WRITABLE)
    assert came.wait(5.0)
