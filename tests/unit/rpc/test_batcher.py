from __future__ import annotations

import math

import pytest

from torchweft.rpc.batching import LAST, NOTHING, SOON, Batcher


def batcher(largest: int = 4, smallest: int = 1, longest_wait_s: float = 1.0) -> Batcher:
    return Batcher(largest, smallest, longest_wait_s)


def test_a_call_that_comes_alone_runs_in_the_next_turn() -> None:
    machine = batcher()
    assert machine.arrived(1, 10.0) is LAST
    assert machine.turn(10.0) == [1]
    assert machine.is_running
    assert machine.ended(10.1) is NOTHING
    assert not machine.is_running
    assert machine.turn(10.1) == []


def test_calls_that_come_before_the_turn_run_together() -> None:
    machine = batcher()
    assert [machine.arrived(number, 0.0) for number in (1, 2, 3)] == [LAST, NOTHING, NOTHING]
    assert machine.turn(0.0) == [1, 2, 3]


def test_a_full_batch_waits_for_no_message() -> None:
    machine = batcher(largest=2)
    assert [machine.arrived(number, 0.0) for number in (1, 2, 3)] == [LAST, SOON, NOTHING]
    assert machine.turn(0.0) == [1, 2]
    # The turn that was asked for first comes all the same, while the batch runs.
    assert machine.turn(0.0) == []
    assert machine.ended(0.0) is LAST
    assert machine.turn(0.0) == [3]


def test_calls_that_come_while_a_batch_runs_are_the_next() -> None:
    machine = batcher(largest=2)
    machine.arrived(1, 0.0)
    machine.turn(0.0)
    assert [machine.arrived(number, 0.0) for number in (2, 3, 4)] == [NOTHING] * 3
    assert machine.ended(0.1) is SOON
    assert machine.turn(0.1) == [2, 3]


def test_fewer_than_the_smallest_batch_wait_for_others_or_for_the_time() -> None:
    machine = batcher(smallest=3)
    assert machine.arrived(1, 5.0) is NOTHING
    assert machine.wake_s == 6.0
    assert machine.arrived(2, 5.5) is NOTHING
    assert machine.turn(5.5) == []
    assert machine.woken(6.0) is SOON
    assert machine.turn(6.0) == [1, 2]
    assert machine.ended(6.1) is NOTHING
    for number in (3, 4):
        assert machine.arrived(number, 7.0) is NOTHING
    assert machine.arrived(5, 7.1) is LAST
    assert machine.turn(7.1) == [3, 4, 5]


def test_an_early_wake_up_is_followed_by_another() -> None:
    machine = batcher(smallest=2)
    machine.arrived(1, 0.0)
    assert machine.left(1)
    machine.arrived(2, 0.9)
    assert machine.wake_s == 1.0
    assert machine.woken(1.0) is NOTHING
    assert machine.wake_s == pytest.approx(1.9)
    assert machine.woken(1.9) is SOON
    assert machine.wake_s == math.inf


def test_messages_that_keep_coming_delay_a_batch_no_longer_than_the_time() -> None:
    machine = batcher()
    assert machine.arrived(1, 0.0) is LAST
    assert machine.woken(1.0) is SOON
    assert machine.turn(1.0) == [1]


def test_a_batch_that_ends_late_is_followed_at_once() -> None:
    machine = batcher(smallest=2)
    machine.arrived(1, 0.0)
    machine.woken(1.0)
    machine.turn(1.0)
    machine.arrived(2, 1.1)
    assert machine.woken(2.1) is NOTHING
    assert machine.ended(2.2) is SOON
    assert machine.turn(2.2) == [2]


def test_a_call_that_left_is_in_no_batch() -> None:
    machine = batcher()
    machine.arrived(1, 0.0)
    machine.arrived(2, 0.0)
    assert machine.left(1)
    assert not machine.left(1)
    assert machine.turn(0.0) == [2]
    assert not machine.left(2)


def test_calls_that_leave_before_a_turn_leave_the_clock_to_the_others() -> None:
    machine = batcher(smallest=2)
    machine.arrived(1, 0.0)
    assert machine.woken(1.0) is SOON
    machine.arrived(2, 1.0)
    machine.left(1)
    assert machine.wake_s == math.inf
    assert machine.turn(1.1) == []
    assert machine.wake_s == 2.0
    assert machine.woken(2.0) is SOON


def test_how_many_calls_make_a_batch_may_change() -> None:
    machine = batcher(smallest=3)
    assert [machine.arrived(number, 0.0) for number in (1, 2)] == [NOTHING, NOTHING]
    assert machine.expect(2, 0.0) is LAST
    assert machine.turn(0.0) == [1, 2]
    assert machine.expect(1, 0.0) is NOTHING  # The end of the batch sees to it.
    machine.arrived(3, 0.0)
    assert machine.ended(0.1) is LAST
    assert machine.expect(2, 0.1) is NOTHING
    assert machine.turn(0.1) == []
    assert machine.arrived(4, 0.2) is LAST
    assert machine.turn(0.2) == [3, 4]
