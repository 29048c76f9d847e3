from __future__ import annotations

import os

import pytest

from torchweft import knobs
from torchweft.transport import spinning as module
from torchweft.transport.spinning import Spinning

SPIN_S = 0.0001


class Clock:
    """The clock that the spinning reads."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return clock


def make() -> Spinning:
    with knobs.SPIN_S.override(SPIN_S):
        return Spinning()


def rest_of(spinning: Spinning, clock: Clock) -> int:
    """Returns the time until a wait may spin again, in lengths of a spin."""
    rest = 0
    while not spinning.is_worthwhile():
        rest += 1
        clock.now_s += SPIN_S * (1 + 1e-9)
    return rest


def test_each_failure_doubles_the_rest_up_to_a_bound(clock: Clock) -> None:
    spinning = make()
    rests = []
    for _ in range(8):
        rests.append(rest_of(spinning, clock))
        spinning.failed(SPIN_S)
    assert rests == [0, 10, 20, 40, 80, 160, 200, 200]


def test_a_success_ends_the_long_rests(clock: Clock) -> None:
    spinning = make()
    for _ in range(8):
        spinning.failed(SPIN_S)
        rest_of(spinning, clock)
    spinning.succeeded()
    assert rest_of(spinning, clock) == 0
    spinning.failed(SPIN_S)
    assert rest_of(spinning, clock) == 10


def test_it_can_be_switched_off() -> None:
    with knobs.SPIN_S.override(0.0):
        assert not Spinning().is_worthwhile()


def test_a_machine_with_one_core_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert not Spinning().is_worthwhile()


@pytest.mark.parametrize(("running", "may"), [(0, False), (1, True), (2, True), (3, False)])
def test_it_goes_on_where_no_thread_waits_for_a_core(
    monkeypatch: pytest.MonkeyPatch, running: int, may: bool
) -> None:
    monkeypatch.setattr(module, "running_threads", lambda: running)
    assert make().may_go_on(0.0) is may


def test_it_never_goes_on_where_it_may_not_spin_longer() -> None:
    with knobs.LONG_SPIN_S.override(0.0):
        assert not make().may_go_on(0.0)


def test_the_rest_is_as_long_as_what_was_spun_in_vain(clock: Clock) -> None:
    spinning = make()
    spinning.failed(10 * SPIN_S)
    assert rest_of(spinning, clock) == 100
