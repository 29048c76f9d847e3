from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.mapreduce import lone_worker
from torchweft import extending, rpc
from torchweft.errors import ArgumentTypeError
from torchweft.mapreduce import shared
from torchweft.mapreduce.shared import Shared, Slot, Turns


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with lone_worker.joined():
        yield


def made(function: Any, *values: Any) -> rpc.RRef[Shared]:
    """Returns a reference to a shared object, made as the caller of a map makes it."""
    packed = extending.Packed.of((function, list(values)), [extending.this_worker()])
    return rpc.remote("worker0", shared.make, (packed.payload, packed.tensors, 1))


def run(reference: rpc.RRef[Any], *args: Any, **kwargs: Any) -> Any:
    return rpc.rpc_sync("worker0", shared.run, (tuple(reference.id), args, kwargs, (0, 1), None))


def collect(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def no_object() -> Shared:
    raise KeyError("no object")


@pytest.mark.parametrize("what", [shared.run, shared.content])
def test_nobody_gets_at_anything_else(what: Any) -> None:
    reference = rpc.remote("worker0", list, ((1, 2),))
    given: tuple[Any, ...] = (tuple(reference.id),)
    with pytest.raises(ArgumentTypeError, match="sent to a list"):
        rpc.rpc_sync(
            "worker0", what, (*given, (), {}, (0, 1), None) if what is shared.run else given
        )


def test_an_object_is_made_of_that_of_another_worker() -> None:
    parent = made(collect, torch.ones(2))
    child = rpc.remote("worker0", shared.pull, (parent,))
    (found,), _ = run(child, Slot(0))
    assert found.tolist() == [1, 1]
    with pytest.raises(KeyError, match="no object"):
        run(rpc.remote("worker0", shared.pull, (rpc.remote("worker0", no_object),)))


def attempt(part: int) -> tuple[int, int]:
    return part, 1


def never() -> bool:
    return False


def always() -> bool:
    return True


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
