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
from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import Context
from torchweft.autograd.data_parallel import AVERAGING
from torchweft.autograd.local_pass import LocalPass
from torchweft.autograd.passes import LedPass, PassPart
from torchweft.errors import BackwardTimeout
from torchweft.protocol.backward import Gradients, Participant, Progress, Report

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


def test_of_several_items_the_first_has_the_handling_scheduled() -> None:
    made = part()
    assert [made.put(ITEM) for _ in range(2)] == [True, False]
    assert made.take_all() == [ITEM, ITEM]
    assert not made.put(ITEM), "the thread that has taken items looks again"
    assert made.take_all() == [ITEM]
    assert made.take_all() == []
    assert made.put(ITEM)


def test_nothing_is_scheduled_for_the_thread_that_leads() -> None:
    made = led()
    for _ in range(2):
        assert not made.put(ITEM)
        assert made.take_all() == [ITEM]
        assert made.take_all() == []
    assert made.is_under_way


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


def test_another_thread_wakes_the_thread_that_waits() -> None:
    made = part()
    thread = threading.Timer(0.01, made.put, (ITEM,))
    thread.start()
    assert made.wait(soon())
    thread.join()


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


def test_a_part_that_averages_says_so_in_reports() -> None:
    made, shown = part(), []
    reactor = made._agent.reactor
    reactor.waiting = lambda parts: contextlib.nullcontext(shown.append(parts))
    average: Any = SimpleNamespace(average=lambda: Progress(executed=[5]))
    made.machine.receive(1, Gradients(5, ()))
    (send,) = made._average(average)
    assert send.message == Report(Progress(executed=[5]))  # type: ignore[union-attr]
    ((wait,),) = [parts() for parts in shown]
    assert (wait.name, wait.workers) == (AVERAGING, ())
