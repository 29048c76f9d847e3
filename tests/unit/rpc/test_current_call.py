"""The call that a function serves: its remaining time, and whether it is cancelled."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator

import pytest

from torchweft.engine.protocol.calls import ServedCall
from torchweft.engine.protocol.registration import Registration
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.calls import current_call
from torchweft.engine.worker.peers import Peer
from torchweft.errors import WorkerLost
from torchweft.rpc.serving import detached, is_cancelled, remaining_time, serving

LIMIT_S = 20.0


def new_peer(name: str) -> Peer:
    registration = Registration(name, 1, ("unix:nowhere",), main="tests")
    return Peer(registration, main_by_name=False, is_self=False)


@pytest.fixture
def call() -> Iterator[ServedCall]:
    """A served call of worker ``caller`` with a time limit of 100 seconds."""
    now_s = time.monotonic()
    call = ServedCall(new_peer("caller"), Frame(Kind.CALL, 0, 7, b"", ()), now_s)
    call.deadline_s = now_s + 100.0
    before = current_call.set(call)
    yield call
    current_call.reset(before)


def test_without_a_call_there_is_no_limit() -> None:
    assert remaining_time() == math.inf
    assert not is_cancelled()
    assert serving() is None


def test_time_passes(call: ServedCall) -> None:
    assert 90.0 < remaining_time() <= 100.0
    assert not is_cancelled()
    call.deadline_s = time.monotonic() - 1.0
    assert remaining_time() == 0.0
    assert is_cancelled()
    # A value that the function returns from here on must not count as its result.
    assert call.was_cancelled


def test_a_caller_gives_up_or_is_lost(call: ServedCall) -> None:
    call.cancel()
    assert is_cancelled()
    call.was_cancelled = False
    call.peer.lost = WorkerLost("lost")
    assert is_cancelled()


def test_what_was_answered_is_over_but_what_was_given_up_stays_so(call: ServedCall) -> None:
    call.end()
    assert remaining_time() == math.inf
    assert not is_cancelled()
    call.was_cancelled = True
    assert is_cancelled()


def test_a_block_may_be_detached(call: ServedCall) -> None:
    call.cancel()
    with contextlib.suppress(KeyError), detached():
        told = (remaining_time(), is_cancelled())
        raise KeyError
    assert told == (math.inf, False)
    assert is_cancelled()


def test_threads_of_the_program_know_nothing_of_it(call: ServedCall) -> None:
    told: list[float] = []
    thread = threading.Thread(target=lambda: told.append(remaining_time()))
    thread.start()
    thread.join(LIMIT_S)
    assert told == [math.inf]
