from __future__ import annotations

import math

import pytest

from torchweft.rpc.batching import NOTHING, SOON, Batcher


def batcher(largest: int = 4, smallest: int = 1, longest_wait_s: float = 1.0) -> Batcher:
    return Batcher(largest, smallest, longest_wait_s)


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
