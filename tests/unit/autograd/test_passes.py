"""Tests the inbox of a part in a pass: nothing is lost, whatever step of a wait it comes at."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from torchweft.autograd import passes
from torchweft.autograd.codec import HEAD_BYTES, PassMode
from torchweft.autograd.contexts import Context
from torchweft.autograd.local_pass import LocalPass
from torchweft.autograd.passes import LedPass, Passes, PassPart
from torchweft.engine.protocol.backward import Participant
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import Kind
from torchweft.errors import BackwardTimeout
from torchweft.ids import scoped_id

ITEM: Any = (None, "an item")


def all_passes() -> Any:
    """Returns the passes of a worker without connections."""
    reactor = SimpleNamespace(waiting=lambda _: contextlib.nullcontext(), is_closing=False)
    peers = {1: SimpleNamespace(name="other")}
    agent = SimpleNamespace(reactor=reactor, peers=peers)
    return SimpleNamespace(agent=agent, me=0, lock=threading.RLock(), timeout_s=0.01)


def part() -> PassPart:
    return PassPart(all_passes(), Participant(0, 1), 9, 7)


def led() -> LedPass:
    context = Context(7, 0)
    return LedPass(all_passes(), context, PassMode(), LocalPass(context))


def soon() -> float:
    return time.monotonic() + 60.0


class _Lock:
    """The lock of the thread at work; an event comes just before or after its release."""

    def __init__(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._before, self._after = before, after
        self.acquire, self.locked = self._lock.acquire, self._lock.locked

    def release(self) -> None:
        before, self._before = self._before, lambda: None
        after, self._after = self._after, lambda: None
        before()
        self._lock.release()
        after()


def test_an_item_that_comes_as_the_handling_ends_is_handled() -> None:
    made, scheduled = part(), []
    made._at_work = _Lock(lambda: scheduled.append(made.put(ITEM)), lambda: None)  # type: ignore
    assert made.take_all() == [ITEM]
    assert scheduled == [False]
    assert made.is_under_way


def test_an_item_that_comes_behind_the_end_of_the_handling_is_scheduled() -> None:
    made, scheduled = part(), []
    made._at_work = _Lock(lambda: None, lambda: scheduled.append(made.put(ITEM)))  # type: ignore
    assert made.take_all() == []
    assert scheduled == [True]
    assert made.take_all() == [ITEM]


PEER: Any = SimpleNamespace(id=1, name="other", lost=None)
PASS_ID, CONTEXT_ID = scoped_id(1, 5), 7


def passes_of_worker(tasks: list[Any], peer: Any = PEER) -> Passes:
    queue = SimpleNamespace(append=lambda task, _: tasks.append(task))
    agent: Any = SimpleNamespace(
        me=SimpleNamespace(id=0), peers={1: peer}, reactor=SimpleNamespace(tasks=queue)
    )
    envelopes: Any = SimpleNamespace(discard=lambda peer, frame: None)
    nothing: Any = None
    return Passes(agent, nothing, nothing, envelopes)


def message() -> Frame:
    control = CONTEXT_ID.to_bytes(8, "little") + bytes(HEAD_BYTES - 8)
    return Frame(Kind.BACKWARD, 0, PASS_ID, control, ())


def test_the_reader_of_a_connection_waits_for_no_thread_in_a_signal_handler() -> None:
    """The handler may have interrupted any step, also one with the lock, and wait for an answer."""
    tasks: list[Any] = []
    made = passes_of_worker(tasks)
    with made.lock:
        for _ in range(2):
            reader = threading.Thread(target=made.on_message, args=(PEER, message()))
            reader.start()
            reader.join(10.0)
            assert not reader.is_alive()
    assert len(tasks) == 1
    (only,) = made.all()
    assert len(only.take_all()) == 2


def test_a_message_revives_no_pass_that_another_thread_just_ends() -> None:
    tasks: list[Any] = []
    made = passes_of_worker(tasks)
    looks = iter([False, True])

    class Ended:
        def __contains__(self, key: object) -> bool:
            return next(looks)

    made._ended = Ended()  # type: ignore[assignment]
    made.on_message(PEER, message())
    assert made.all() == []
    assert tasks == []


def test_a_message_of_a_pass_whose_leader_is_just_lost_begins_none() -> None:
    looks = iter([None, "end of file"])

    class Leader:
        id, name = 1, "other"
        lost = property(lambda self: next(looks))

    tasks: list[Any] = []
    made = passes_of_worker(tasks, Leader())
    made.on_message(PEER, message())
    assert made.all() == []
    assert tasks == []


def end(made: PassPart) -> None:
    made.close()


def put(made: PassPart) -> None:
    made.put(ITEM)


@pytest.mark.parametrize("make", [part, led])
@pytest.mark.parametrize("event", [put, end])
@pytest.mark.parametrize("step", ["before", "made", "waiting"])
def test_a_wait_ends_whatever_step_an_item_or_the_end_comes_at(
    make: Callable[[], PassPart],
    event: Callable[[PassPart], object],
    step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make()

    class Flag(passes.Flag):
        """Has the event come before the wait looks at the inbox, or once it has begun to block."""

        def __init__(self) -> None:
            super().__init__()
            if step == "made":  # Not published yet.
                event(made)

        def wait(self, timeout_s: float) -> bool:
            event(made)
            return super().wait(0.0)

    monkeypatch.setattr(passes, "Flag", Flag)
    if step == "before":
        event(made)
    assert made.wait(soon())


def test_a_wait_ends_at_its_deadline_with_the_name_of_the_worker() -> None:
    made = part()
    made._awaited = 1
    with pytest.raises(BackwardTimeout, match="'other'"):
        made.wait(time.monotonic() + 0.01)


def test_a_wait_ends_when_the_worker_shuts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_LOOK_S", 0.001)
    made = part()
    made._agent.reactor.is_closing = True
    assert not made.wait(soon())
