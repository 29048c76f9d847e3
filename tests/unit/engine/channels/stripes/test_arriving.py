from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.memory_counts import pool_counts
from torchweft.engine.channels.channel import NotInTime
from torchweft.engine.channels.memory import BufferPool
from torchweft.engine.channels.stripes import (
    Arrivals,
    ReceivingConnection,
    Stripe,
    TransferKey,
)
from torchweft.engine.channels.transfer_loop import NOTHING
from torchweft.errors import WorkerLost

LIMIT_S = 20.0
LIMIT_BYTES = 1 << 24
SET = 1
KEY = TransferKey(SET, 7, 0)


class End:
    """A receiving connection with the other side of its socket."""

    def __init__(self, arrivals: Arrivals, set_number: int = 1) -> None:
        ours, self.socket = socket.socketpair()
        self.causes: list[str] = []
        self.receiving = ReceivingConnection(ours, arrivals, set_number, self.causes.append)

    def close(self) -> None:
        self.receiving.close()
        self.socket.close()

    def bring(self, data: bytes) -> int:
        self.socket.sendall(data)
        return self.receiving.read()


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(1 << 20)


@pytest.fixture
def arrivals(pool: BufferPool) -> Arrivals:
    return Arrivals(pool.lease, LIMIT_BYTES)


@pytest.fixture
def ends(arrivals: Arrivals) -> Iterator[list[End]]:
    made = [End(arrivals), End(arrivals)]
    yield made
    for end in made:
        end.close()


def content(size_bytes: int) -> bytes:
    return bytes(number % 251 for number in range(size_bytes))


def stripe(data: bytes, start: int, end: int, key: TransferKey = KEY) -> bytes:
    return Stripe(*key[1:], start, end - start, len(data)).encode() + data[start:end]


def waiting(arrivals: Arrivals, size_bytes: int, stall_s: float = LIMIT_S) -> Waiter:
    return Waiter(arrivals, size_bytes, stall_s)


class Waiter(threading.Thread):
    """Waits for the transfer in a thread of its own."""

    def __init__(self, arrivals: Arrivals, size_bytes: int, stall_s: float) -> None:
        super().__init__(name="waiter")
        self._wait = lambda: arrivals.wait(KEY, size_bytes, stall_s)
        self.memory: memoryview | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.memory = self._wait()
        except Exception as error:
            self.error = error

    def result(self) -> memoryview | Exception | None:
        self.join(LIMIT_S)
        assert not self.is_alive()
        return self.error or self.memory


def test_memory_is_taken_once_and_given_back_when_nobody_uses_it(
    arrivals: Arrivals, ends: list[End], pool: BufferPool
) -> None:
    data = content(50_000)
    waiter = waiting(arrivals, 50_000)
    ends[0].bring(stripe(data, 0, 25_000))
    ends[0].bring(stripe(data, 25_000, 50_000))
    assert waiter.result() == data
    assert pool_counts(pool).leased_count == 1
    waiter.memory = None
    # The connection that received the data does not keep it either.
    assert pool_counts(pool).leased_count == 0


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_what_nobody_wants_is_dropped(
    arrivals: Arrivals, ends: list[End], pool: BufferPool, when: str
) -> None:
    data = content(5000)
    for moment in ("before", "within", "after"):
        if moment == when:
            arrivals.discard(KEY, 5000)
        if moment == "before":
            ends[0].bring(stripe(data, 0, 100))
        elif moment == "within":
            ends[1].bring(stripe(data, 100, 5000))
    assert len(arrivals.under_way) == 0
    assert pool_counts(pool).leased_count == 0


def test_the_loss_of_the_peer_ends_every_wait(
    arrivals: Arrivals, ends: list[End], pool: BufferPool
) -> None:
    data = content(5000)
    waiter = waiting(arrivals, 5000)
    ends[0].bring(stripe(data, 0, 4000))
    arrivals.fail(lambda: WorkerLost("killed", worker="w", since=0.0, cause="a test"))
    arrivals.fail(lambda: LookupError("again"))
    assert isinstance(waiter.result(), WorkerLost)
    with pytest.raises(WorkerLost):
        arrivals.wait(TransferKey(SET, 8, 0), 10, LIMIT_S)
    assert ends[0].bring(stripe(data, 4000, 5000)) == NOTHING
    assert len(ends[0].causes) == 1
    ends[0].receiving.close()
    del waiter
    assert len(arrivals.under_way) == 0
    assert pool_counts(pool).leased_count == 0


def test_silence_is_noticed_and_progress_is_not_silence(
    arrivals: Arrivals, ends: list[End]
) -> None:
    data = content(1000)
    waiter = waiting(arrivals, 1000, stall_s=0.01)
    assert isinstance(waiter.result(), TimeoutError)
    patient = waiting(arrivals, 1000, stall_s=0.5)
    for start in range(0, 1000, 100):
        ends[0].bring(stripe(data, start, start + 100))
    assert patient.result() == data


@pytest.mark.parametrize("size", [0, 1, 39, 41, 100])
def test_a_connection_that_ends_is_nobody_s_fault(
    arrivals: Arrivals, ends: list[End], size: int
) -> None:
    """It may end between stripes or within one: the receiver requests the missing data."""
    ends[0].socket.sendall(stripe(content(100), 0, 60)[:size])
    ends[0].receiving.read()
    ends[0].socket.close()
    assert ends[0].receiving.read() == NOTHING
    assert ends[0].causes == [""]


@pytest.mark.parametrize(
    ("sent", "cause"),
    [
        (Stripe(7, 0, 0, 10, LIMIT_BYTES + 1).encode(), "the limit is"),
        (Stripe(7, 0, 8, 10, 10).encode(), "no part"),
        (Stripe(7, 0, 0, 10, 20).encode(), "bytes once and 20 then"),
        (stripe(content(100), 0, 100) + stripe(content(100), 0, 1), "more stripes than bytes"),
        (b"GET / HTTP/1.1\r\nHost: somewhere or other\r\n", "limit|no part"),
    ],
    ids=["too large", "outside", "another size", "twice", "another protocol"],
)
def test_nonsense_ends_the_connection(
    arrivals: Arrivals, ends: list[End], sent: bytes, cause: str
) -> None:
    ends[1].bring(stripe(content(100), 0, 10))
    assert ends[0].bring(sent) == NOTHING
    (told,) = ends[0].causes
    assert told.startswith("a data connection carried malformed data")
    assert re.search(cause, told)


def test_no_memory_is_a_cause(ends: list[End]) -> None:
    def allocate(size_bytes: int) -> memoryview:
        raise MemoryError

    end = End(Arrivals(allocate, LIMIT_BYTES))
    assert end.bring(stripe(content(100), 0, 100)) == NOTHING
    assert end.causes == ["there is no memory for a tensor of it"]
    end.close()


# Connections that broke


def test_who_waits_for_what_is_given_up_is_told(
    arrivals: Arrivals, ends: list[End], pool: BufferPool
) -> None:
    waiter = waiting(arrivals, 5000)
    ends[0].bring(stripe(content(5000), 0, 4000))
    ends[0].receiving.close()
    arrivals.give_up(SET)
    assert isinstance(waiter.result(), NotInTime)
    del waiter
    assert len(arrivals.under_way) == 0
    assert pool_counts(pool).leased_count == 0


def test_the_end_of_a_set_ends_earlier_sets_and_no_later_one(
    arrivals: Arrivals, ends: list[End]
) -> None:
    data, later = content(100), TransferKey(SET + 1, 7, 0)
    late = End(arrivals, SET + 1)
    with contextlib.closing(late):
        late.bring(stripe(data, 0, 50))
        ends[0].bring(stripe(data, 0, 50))
        arrivals.give_up(SET)
        arrivals.give_up(SET - 1)
        late.bring(stripe(data, 50, 100))
        assert arrivals.wait(later, 100, LIMIT_S) == data
        assert len(arrivals.under_way) == 0
        arrivals.give_up(SET + 1)
        with pytest.raises(NotInTime):
            arrivals.wait(KEY, 100, LIMIT_S)


def test_nothing_is_kept_of_what_a_broken_set_brings_late(
    arrivals: Arrivals, ends: list[End], pool: BufferPool
) -> None:
    """A connection may be read until it is closed."""
    ends[0].bring(stripe(content(100), 0, 50))
    arrivals.give_up(SET)
    assert ends[0].bring(stripe(content(100), 50, 100)) == NOTHING
    assert ends[1].bring(stripe(content(100), 0, 50)) == NOTHING
    for end in ends:
        end.receiving.close()
    assert len(arrivals.under_way) == 0
    assert pool_counts(pool).leased_count == 0
