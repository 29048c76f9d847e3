from __future__ import annotations

import os
import threading

import pytest

from torchweft import knobs
from torchweft.runtime import interrupts
from torchweft.transport import spinning as module
from torchweft.transport.spinning import Look, Spinning

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


def ask_quickly(spinning: Spinning, clock: Clock, count: int = 4) -> bool:
    """Whether one of ``count`` waits may spin, each begun half a spin after the one before."""
    answers = []
    for _ in range(count):
        clock.now_s += SPIN_S / 2
        answers.append(spinning.is_worthwhile())
    return any(answers)


def test_quick_waits_end_a_rest(clock: Clock) -> None:
    spinning = make()
    spinning.failed(100 * SPIN_S)
    assert not ask_quickly(spinning, clock, 3)
    assert ask_quickly(spinning, clock, 1)


def test_slow_waits_do_not_end_a_rest(clock: Clock) -> None:
    spinning = make()
    spinning.failed(100 * SPIN_S)
    for _ in range(50):
        clock.now_s += 2 * SPIN_S
        assert not spinning.is_worthwhile()


def test_quick_waits_that_fail_to_spin_end_no_further_rest(clock: Clock) -> None:
    spinning = make()
    spinning.failed(100 * SPIN_S)
    assert ask_quickly(spinning, clock)
    spinning.failed(100 * SPIN_S)
    assert not ask_quickly(spinning, clock, 50)
    clock.now_s += 10_000 * SPIN_S
    assert spinning.is_worthwhile()
    spinning.succeeded()
    spinning.failed(100 * SPIN_S)
    assert ask_quickly(spinning, clock)


class Core:
    """A core that a thread offers; others take it for ``taken_s``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.taken_s = 0.0
        self.offers = 0

    def __call__(self) -> None:
        self.offers += 1
        self._clock.now_s += self.taken_s


@pytest.fixture
def core(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Core:
    core = Core(clock)
    monkeypatch.setattr(module, "sched_yield", core)
    return core


def look_once(look: Look, clock: Clock, after_s: float) -> bool:
    clock.now_s += after_s
    return look.goes_on()


def test_a_thread_that_spins_for_longer_offers_its_core(clock: Clock, core: Core) -> None:
    look = make().begin()
    assert look_once(look, clock, 0.9 * module._ALONE_S)
    assert core.offers == 0
    assert look_once(look, clock, 0.2 * module._ALONE_S)
    assert core.offers == 1


def test_where_the_offer_is_taken_the_next_wait_offers_at_once(clock: Clock, core: Core) -> None:
    spinning = make()
    core.taken_s = 4 * module._SWITCH_S
    assert look_once(spinning.begin(), clock, 1.1 * module._ALONE_S)
    core.taken_s = 0.0
    assert look_once(spinning.begin(), clock, 0.0)
    assert core.offers == 2
    # This one was not taken, so the sides no longer share a core.
    assert look_once(spinning.begin(), clock, 0.0)
    assert core.offers == 2


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """The moves to another core; not in the main thread."""
    moves: list[None] = []
    monkeypatch.setattr(module, "leave_core", lambda: moves.append(None))
    monkeypatch.setattr(interrupts, "main_id", 0)
    return moves


def offer_taken(spinning: Spinning, clock: Clock, core: Core) -> None:
    core.taken_s = 4 * module._SWITCH_S
    assert look_once(spinning.begin(), clock, 1.1 * module._ALONE_S)


def test_a_thread_whose_offer_is_taken_moves_to_the_other_core_but_not_often(
    clock: Clock, core: Core, moves: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "running_threads", lambda: 2)
    spinning = make()
    offer_taken(spinning, clock, core)
    assert len(moves) == 1
    offer_taken(spinning, clock, core)
    assert len(moves) == 1
    clock.now_s += module._MOVE_S
    offer_taken(spinning, clock, core)
    assert len(moves) == 2


@pytest.mark.parametrize(("running", "cores"), [(3, 2), (0, 2), (2, 4)])
def test_a_thread_stays_where_the_other_core_is_busy_or_there_are_more(
    clock: Clock,
    core: Core,
    moves: list[None],
    monkeypatch: pytest.MonkeyPatch,
    running: int,
    cores: int,
) -> None:
    monkeypatch.setattr(module, "running_threads", lambda: running)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    offer_taken(make(), clock, core)
    assert not moves


def test_the_main_thread_stays(
    clock: Clock, core: Core, moves: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "running_threads", lambda: 2)
    monkeypatch.setattr(interrupts, "main_id", threading.get_ident())
    offer_taken(make(), clock, core)
    assert not moves


def test_a_program_that_takes_the_core_for_long_gets_no_further_offer(
    clock: Clock, core: Core
) -> None:
    spinning = make()
    core.taken_s = 2 * module._FOREIGN_S
    assert not look_once(spinning.begin(), clock, 0.5 * SPIN_S)
    assert not spinning.is_worthwhile()
    assert look_once(spinning.begin(), clock, 0.5 * SPIN_S)
    assert core.offers == 1
    clock.now_s += module._KEEP_S
    core.taken_s = 0.0
    assert look_once(spinning.begin(), clock, 0.5 * SPIN_S)
    assert core.offers == 2
