from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.unit.engine.worker.group import Member, group_of
from torchweft import knobs
from torchweft.engine.worker.references import OwnedValue
from torchweft.ids import ReferenceId

LIMIT_S = 20.0


def await_true(claim: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(5000):
        if claim():
            return
        pause.wait(0.001)
    raise AssertionError("it never comes true")


@pytest.fixture
def trio() -> Iterator[list[Member]]:
    with knobs.REFERENCE_BATCH_S.override(0.001), group_of(3) as members:
        for member in members:
            member.start()
        yield members


def hand_on(giver: Member, taker: Member, reference: ReferenceId) -> bool:
    """Hands a reference on, as a message that contains it does."""
    handed = giver.references.hand_on(reference, giver.peer(taker))
    return taker.references.received(handed, taker.peer(giver))


def test_who_blocks_for_a_value_is_let_go_and_nobody_is_called_back() -> None:
    owned, told = OwnedValue(), []
    owned.when_ready(told.append)
    error = ValueError("the worker leaves")
    owned.resolve(None, error, runs_callbacks=False)
    assert owned.wait(0.0)
    owned.resolve(1)
    assert (owned.value, owned.error, told) == (None, error, [])
    made = OwnedValue()
    made.resolve(1)
    made.resolve(None, error, runs_callbacks=False)
    assert (made.value, made.error) == (1, None)


def test_what_is_held_of_others_is_named_until_its_handle_ends(trio: list[Member]) -> None:
    owner, user, _ = trio
    own = user.references.own("own")
    reference = owner.references.own("value")
    hand_on(owner, user, reference)
    (line,) = user.references.report_held()
    assert line.startswith(f"{reference} made at ")
    assert owner.references.report_held() == []
    await_true(lambda: user.references.census().unanswered == 0)
    assert owner.references.census().shared == 1
    user.references.end_handle(reference)
    assert user.references.report_held() == []
    await_true(lambda: owner.references.census().shared == 0)
    user.references.end_handle(own)
    owner.references.end_handle(reference)


def test_a_thread_with_the_lock_holds_up_no_other_job_of_the_timers(trio: list[Member]) -> None:
    """It may be in a signal handler that waits for an answer, on a connection yet to be armed."""
    keeper, timers = trio[0].references, trio[0].agent.timers
    ticked, called = threading.Event(), threading.Event()

    def job(_: float) -> float:
        if ticked.is_set():
            called.set()
        return math.inf

    tick = keeper._timer.job
    keeper._timer.job = lambda now_s: (ticked.set(), tick(now_s))[1]
    timer = timers.add(job)
    reference = keeper.own("value")
    with keeper._lock:
        keeper.end_handle(reference)
        assert ticked.wait(LIMIT_S)
        timers.ask(timer, 0.0)
        assert called.wait(LIMIT_S)
        assert reference in keeper._values
    await_true(lambda: reference not in keeper._values)
