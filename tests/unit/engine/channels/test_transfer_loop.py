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


def test_threads_start_with_the_first_connection_and_end_with_the_loop(
    loop: TransferLoop, pair: Pair
) -> None:
    assert pump_threads() == []
    loop.watch(pair[0].fileno(), lambda: NOTHING, READABLE)
    assert pump_threads() == ["test-loop-1", "test-loop-2"]
    loop.close()
    assert pump_threads() == []
    loop.close()


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


def test_a_handler_is_called_when_there_is_something_to_read(
    loop: TransferLoop, pair: Pair
) -> None:
    got: list[bytes] = []
    came = threading.Semaphore(0)

    def read() -> int:
        got.append(pair[0].recv(100))
        came.release()
        return READABLE

    loop.watch(pair[0].fileno(), read, READABLE)
    for part in (b"one", b"two"):
        pair[1].sendall(part)
        assert came.acquire(timeout=LIMIT_S)
    assert got == [b"one", b"two"]


def test_one_thread_at_a_time_deals_with_a_connection(loop: TransferLoop, pair: Pair) -> None:
    is_free = threading.Lock()
    done = threading.Event()
    calls = overlaps = 0

    def write() -> int:
        nonlocal calls, overlaps
        overlaps += not is_free.acquire(blocking=False)
        calls += 1
        if calls == 200:
            done.set()
            return NOTHING
        is_free.release()
        return WRITABLE

    loop.watch(pair[0].fileno(), write, WRITABLE)
    assert done.wait(LIMIT_S)
    assert not overlaps


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


def test_a_slow_connection_does_not_hold_up_another(loop: TransferLoop, pair: Pair) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        assert may_end.wait(LIMIT_S)
        return NOTHING

    loop.watch(pair[0].fileno(), slow, WRITABLE)
    assert begun.wait(LIMIT_S)
    fast = threading.Event()
    pair[1].setblocking(False)
    loop.watch(pair[1].fileno(), lambda: fast.set() or NOTHING, WRITABLE)
    assert fast.wait(LIMIT_S)
    may_end.set()


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


def test_what_is_forgotten_is_not_called(loop: TransferLoop, pair: Pair) -> None:
    called = threading.Event()
    loop.watch(pair[0].fileno(), lambda: called.set() or NOTHING, READABLE)
    loop.forget(pair[0].fileno())
    loop.arm(pair[0].fileno(), WRITABLE)
    assert not called.wait(0.02)


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
