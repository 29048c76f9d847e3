"""Futures in order of completion; ``tests/contract/processes`` covers calls to several workers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from torchweft.errors import ArgumentTypeError, CallTimeout
from torchweft.rpc.calls import as_completed

LIMIT_S = 20.0


def futures(count: int) -> list[torch.futures.Future[Any]]:
    return [torch.futures.Future() for _ in range(count)]


def test_what_is_done_comes_first_and_everything_once() -> None:
    first, second, third = made = futures(3)
    done = as_completed([*made, second], LIMIT_S)
    third.set_result(3)
    assert next(done) is third
    second.set_result(2)
    first.set_result(1)
    assert [future.wait() for future in done] == [2, 1]
    assert list(as_completed(made)) == made
    assert list(as_completed([])) == []


def test_it_waits_for_another_thread() -> None:
    (future,) = futures(1)
    taking = threading.Event()

    def complete() -> None:
        taking.wait(LIMIT_S)
        future.set_result("late")

    thread = threading.Thread(target=complete)
    thread.start()
    done = as_completed([future], LIMIT_S)
    taking.set()
    assert next(done).wait() == "late"
    thread.join()


def test_two_iterators_go_over_the_same_futures() -> None:
    made = futures(2)
    both = as_completed(made, LIMIT_S), as_completed(made, LIMIT_S)
    for future in made:
        future.set_result(None)
    assert [list(done) for done in both] == [made, made]


def test_an_iterator_that_nobody_ends_keeps_nothing() -> None:
    first, second = futures(2)
    done = as_completed([first, second], LIMIT_S)
    first.set_result(1)
    assert next(done) is first
    del done
    second.set_result(2)
    assert second.wait() == 2


def test_the_limit_counts_from_the_call() -> None:
    made = futures(2)
    made[0].set_result(1)
    done = as_completed(made, 0.01)
    assert next(done) is made[0]
    with pytest.raises(CallTimeout, match=r"^1 call has not ended within 0\.0 s$") as late:
        next(done)
    assert late.value.elapsed_s == 0.01


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (torch.futures.Future(), "several futures"),
        (3, "several futures"),
        ([3], "what rpc_async returns"),
    ],
)
def test_what_is_no_future_is_refused_at_once(given: Any, text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=text):
        as_completed(given)
