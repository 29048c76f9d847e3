"""Tests that turns are granted in the order of the requests, and that no turn is lost."""

from __future__ import annotations

import itertools
import threading

from torchweft.mapreduce.turns import Turns


def never() -> bool:
    return False


def test_as_many_have_a_turn_as_there_are() -> None:
    turns = Turns(2)
    assert [turns.take(number) is None for number in range(3)] == [True, True, False]
    turns.give_back()  # The third request gets it.
    assert turns.take(3) is not None


def test_a_turn_that_is_given_back_goes_to_the_first_that_waits() -> None:
    turns = Turns(1)
    turns.take(0)
    first, second = turns.take(1), turns.take(2)
    assert first is not None
    assert second is not None
    turns.give_back()
    assert (first.event.is_set(), second.event.is_set()) == (True, False)
    assert turns.wait(first, 0.0, never)
    turns.give_back()
    assert turns.wait(second, 0.0, never)
    turns.give_back()
    assert turns.take(3) is None


def test_who_is_not_wanted_any_more_leaves_the_queue() -> None:
    turns = Turns(1)
    turns.take(0)
    first, second = turns.take(1), turns.take(2)
    assert first is not None
    assert second is not None
    assert not turns.wait(first, 0.0, lambda: True)
    turns.give_back()
    assert turns.wait(second, 0.0, never)


def test_a_turn_that_nobody_wants_is_handed_on() -> None:
    turns = Turns(1)
    turns.take(0)
    first, second = turns.take(1), turns.take(2)
    assert first is not None
    assert second is not None
    turns.give_back()
    assert not turns.wait(first, 0.0, lambda: True)
    assert turns.wait(second, 0.0, never)


def test_threads_take_turns() -> None:
    turns, running, most = Turns(2), [], []
    lock, numbers = threading.Lock(), itertools.count()

    def work() -> None:
        for _ in range(200):
            place = turns.take(next(numbers))
            assert place is None or turns.wait(place, 10.0, never)
            with lock:
                running.append(1)
                most.append(len(running))
            with lock:
                running.pop()
            turns.give_back()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert len(most) == 800
    assert max(most) <= 2
    assert [turns.take(number) for number in (-2, -3)] == [None, None]


def test_who_comes_before_the_one_it_is_behind_waits_for_it() -> None:
    turns = Turns(1)
    early = turns.take(1, after=0)
    assert early is not None, "though there is a turn"
    assert turns.take(0) is None
    assert not early.event.is_set()
    turns.give_back()
    assert turns.wait(early, 0.0, never)


def test_who_is_behind_another_may_run_beside_it() -> None:
    turns = Turns(2)
    early = turns.take(1, after=0)
    assert early is not None
    assert turns.take(0) is None
    assert early.event.is_set()


def test_who_waits_for_one_that_never_comes_is_called_off() -> None:
    turns = Turns(1)
    early = turns.take(1, after=0)
    assert early is not None
    assert not turns.wait(early, 0.0, lambda: True)
    assert turns.take(2) is None
