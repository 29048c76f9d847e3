"""Tests that turns are granted in the order of the requests, and that no turn is lost."""

from __future__ import annotations

import itertools
import threading

from torchweft.mapreduce.shared import Turns


def attempt(part: int) -> tuple[int, int]:
    return part, 1


def never() -> bool:
    return False


def always() -> bool:
    return True


def test_as_many_have_a_turn_as_there_are() -> None:
    turns = Turns(2)
    assert [turns.take(attempt(number)) for number in range(3)] == [True, True, False]
    turns.give_back()  # The third request gets it.
    assert not turns.take(attempt(3))


def test_a_turn_that_is_given_back_goes_to_the_first_that_waits() -> None:
    turns = Turns(1)
    assert [turns.take(attempt(number)) for number in range(3)] == [True, False, False]
    turns.give_back()
    assert turns.wait(attempt(1), never)
    assert not turns.wait(attempt(2), always), "it has left the queue"
    turns.give_back()
    assert turns.take(attempt(3))


def test_who_is_not_wanted_any_more_leaves_the_queue() -> None:
    turns = Turns(1)
    assert [turns.take(attempt(number)) for number in range(3)] == [True, False, False]
    assert not turns.wait(attempt(1), always)
    turns.give_back()
    assert turns.wait(attempt(2), never)


def test_a_turn_that_nobody_wants_is_handed_on() -> None:
    turns = Turns(1)
    assert [turns.take(attempt(number)) for number in range(3)] == [True, False, False]
    turns.give_back()
    assert not turns.wait(attempt(1), always)
    assert turns.wait(attempt(2), never)


def test_threads_take_turns() -> None:
    turns, running, most = Turns(2), [], []
    lock, numbers = threading.Lock(), itertools.count()

    def work() -> None:
        for _ in range(200):
            number = next(numbers)
            assert turns.take(attempt(number)) or turns.wait(attempt(number), never)
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
    assert [turns.take(attempt(number)) for number in (-2, -3)] == [True, True]


def test_who_comes_before_the_one_it_is_behind_waits_for_it() -> None:
    turns = Turns(1)
    assert not turns.take(attempt(1), after=attempt(0)), "though there is a turn"
    assert turns.take(attempt(0))
    turns.give_back()
    assert turns.wait(attempt(1), never)


def test_who_is_behind_another_may_run_beside_it() -> None:
    turns = Turns(2)
    assert not turns.take(attempt(1), after=attempt(0))
    assert turns.take(attempt(0))
    assert turns.wait(attempt(1), never)
    assert not turns.take(attempt(2)), "both turns are taken"


def test_who_waits_for_one_that_never_comes_is_called_off() -> None:
    turns = Turns(1)
    assert not turns.take(attempt(1), after=attempt(0))
    assert not turns.wait(attempt(1), always)
    assert turns.take(attempt(2))
