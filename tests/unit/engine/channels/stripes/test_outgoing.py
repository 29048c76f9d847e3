from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from torchweft.engine.channels import stripes as striped
from torchweft.engine.channels.stripes import (
    HEADER_BYTES,
    Outbox,
    Part,
    SendingConnection,
    Stripe,
    decode_stripe,
)
from torchweft.engine.channels.transfer_loop import NOTHING, WRITABLE

LIMIT_S = 20.0
STRIPE_BYTES = 100


class End:
    """A sending connection with the other side of its socket."""

    def __init__(self, outbox: Outbox) -> None:
        ours, self.socket = socket.socketpair()
        self.causes: list[str] = []
        self.sending = SendingConnection(ours, outbox, self.causes.append)
        assert self.sending.write() == NOTHING  # The connection is idle from here on.

    def close(self) -> None:
        self.sending.close()
        self.socket.close()

    def receive_stripe(self) -> tuple[Stripe, bytes]:
        stripe = decode_stripe(self.socket.recv(HEADER_BYTES, socket.MSG_WAITALL), 1 << 40)
        return stripe, self.socket.recv(stripe.length_bytes, socket.MSG_WAITALL)


@pytest.fixture
def outbox() -> Outbox:
    return Outbox(STRIPE_BYTES)


@pytest.fixture
def ends(outbox: Outbox) -> Iterator[list[End]]:
    made = [End(outbox), End(outbox)]
    yield made
    for end in made:
        end.close()


def buffer_of(size_bytes: int, value: int = 0) -> memoryview:
    return memoryview(bytes((value + number) % 251 for number in range(size_bytes)))


def whole(*buffers: memoryview) -> list[Part]:
    """Returns transfers of whole buffers."""
    return [(n, each, 0, each.nbytes) for n, each in enumerate(buffers)]


def test_a_full_socket_is_not_waited_for(outbox: Outbox, ends: list[End]) -> None:
    big = Outbox(1 << 20)
    end = End(big)
    sent = memoryview(np.arange(1 << 20, dtype=np.uint8))
    (connection,) = big.put(1, whole(sent))
    interest = connection.write()
    assert interest == WRITABLE
    assert not big.is_empty
    received = bytearray()
    while len(received) < HEADER_BYTES + sent.nbytes:
        received += end.socket.recv(1 << 20)
        interest = interest and connection.write()
    assert interest == NOTHING
    assert received[HEADER_BYTES:] == sent
    assert big.is_empty
    end.close()


def test_a_close_lets_go_of_everything(outbox: Outbox, ends: list[End]) -> None:
    arrays = [np.ones(STRIPE_BYTES * 30000, np.uint8) for _ in range(2)]
    alive = [weakref.ref(array) for array in arrays]
    started = outbox.put(1, whole(*[memoryview(array) for array in arrays]))
    del arrays
    assert started[0].write() == WRITABLE
    outbox.close()
    for end in ends:
        end.sending.close()
        assert end.sending.write() == NOTHING
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert outbox.put(2, whole(buffer_of(1))) == []
    assert outbox.is_empty


def test_nobody_waits_for_room_at_a_peer_that_takes_nothing(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(striped, "SEND_PATIENCE_S", 0.05)
    for token in range(40):
        outbox.put(token, whole(buffer_of(1)))
    began_s = time.monotonic()
    outbox.wait_for_room()
    assert 0.05 <= time.monotonic() - began_s < LIMIT_S


def test_who_has_much_to_send_waits_for_room(
    outbox: Outbox, ends: list[End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(striped, "SEND_PATIENCE_S", LIMIT_S)
    for token in range(40):
        outbox.put(token, whole(buffer_of(1)))
    begun, has_room = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        outbox.wait_for_room()
        has_room.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(LIMIT_S)
    for _ in range(8):
        assert not has_room.is_set()
        outbox.take(ends[0].sending)
    outbox.take(ends[0].sending)
    assert has_room.wait(LIMIT_S)
    thread.join(LIMIT_S)


def test_no_transfer_is_left_behind_by_a_connection_that_becomes_idle() -> None:
    """Race: a transfer is added while a connection goes idle; one side must notice the other."""
    outbox = Outbox(STRIPE_BYTES)
    end = End(outbox)
    count = 4 * 500
    start = threading.Barrier(4)

    def put(first: int) -> None:
        start.wait()
        for token in range(first, first + 500):
            for connection in outbox.put(token, whole(buffer_of(3))):
                while connection.write() == WRITABLE:
                    pass

    writers = [threading.Thread(target=put, args=(500 * number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    tokens = {end.receive_stripe()[0].token for _ in range(count)}
    for writer in writers:
        writer.join(LIMIT_S)
    assert tokens == set(range(count))
    assert outbox.is_empty
    end.close()
