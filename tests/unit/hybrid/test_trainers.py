"""All-reduces that end with the loss of a worker: in real backward passes, without a group."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchweft.errors import CallTimeout, WorkerLost
from torchweft.hybrid import trainers
from torchweft.hybrid.trainers import Reductions, Trainers

TRAINERS = 4
Future = Any


class Bucket:
    """A bucket of DDP."""

    def __init__(self, number: int, *gradients: float) -> None:
        self._number = number
        self._gradients = torch.tensor(gradients, dtype=torch.float64)

    def index(self) -> int:
        return self._number

    def buffer(self) -> Tensor:
        return self._gradients


class Group:
    """In place of a process group: reductions end when the test says so."""

    def __init__(self) -> None:
        self.open: list[tuple[Future, Tensor]] = []

    def all_reduce(self, gradients: Tensor, group: Any, *, async_op: bool) -> Group:
        assert (group, async_op) == ("trainers", True)
        self.open.append((torch.futures.Future(), gradients))
        return self

    def get_future(self) -> Future:
        return self.open[-1][0]

    def end(self) -> None:
        """Ends all: each trainer has the same gradients."""
        while self.open:
            future, gradients = self.open.pop()
            future.set_result([gradients * TRAINERS])


class Waits(threading.Condition):
    """Does something when a pass begins to wait."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.acts = [act]

    def wait_for(self, predicate: Any, timeout: float | None = None) -> Any:
        while self.acts:
            self.acts.pop()()
        return super().wait_for(predicate, 10 if timeout is None else timeout)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    found = Group()
    monkeypatch.setattr(trainers.distributed, "all_reduce", found.all_reduce)
    monkeypatch.setattr(trainers, "tell_losses", lambda *_: None)
    monkeypatch.setattr(trainers, "is_there", lambda worker: worker == "back")
    return found


def made(*, averages: bool = True, **hook: Any) -> Reductions:
    made = Reductions(
        Trainers("trainers", tuple("abcd"), 0),
        "token",
        "m",
        ["ps0", "back"],
        math.inf,
        averages=averages,
        **hook,
    )
    made._ask = lambda: {"absent": f"is after {made.begun - 1}"}  # type: ignore[method-assign]
    return made


def backward(found: Reductions, *buckets: Bucket) -> list[Future]:
    """Runs a backward pass, in which the gradients of buckets are reduced."""
    futures: list[Future] = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: futures.extend(map(found.reduce, buckets)))  # type: ignore[no-untyped-call]
    leaf.sum().backward()
    return futures


def lose(found: Reductions, worker: str) -> None:
    found.worker_lost(WorkerLost("lost", worker=worker))


@pytest.mark.parametrize(("averages", "expected"), [(True, [2.0, 6.0]), (False, [8.0, 24.0])])
def test_a_pass_ends_when_its_reductions_have(
    group: Group, averages: bool, expected: list[float]
) -> None:
    found = made(averages=averages)
    waits = found._changed = Waits(group.end)
    futures = backward(found, Bucket(0, 2.0, 6.0), Bucket(1, 1.0))
    assert not waits.acts
    assert [future.done() for future in futures] == [True, True]
    assert futures[0].value().tolist() == expected
    waits.acts.append(group.end)
    assert backward(found, Bucket(0, 1.0))[0].done()  # The next pass waits for its own.


@pytest.mark.parametrize("ended_by", ["limit", "group"])
def test_a_pass_that_waits_too_long_says_who_is_missing(group: Group, ended_by: str) -> None:
    found = made()
    found._changed = Waits(lambda: None)
    if ended_by == "limit":
        found._limit_s = 0.01
    else:
        error = RuntimeError("Timed out waiting 8000ms for recv operation to complete")
        found._changed = Waits(lambda: group.open[0][0].set_exception(error))
    with pytest.raises(CallTimeout, match=r"all-reduce of .* 'absent', which is after 0") as caught:
        backward(found, Bucket(0, 1.0))
    assert caught.value.worker == "absent"


def test_a_loss_ends_a_pass_that_waits_and_those_after_it(group: Group) -> None:
    found = made()
    found._changed = Waits(lambda: lose(found, "ps0"))
    with pytest.raises(WorkerLost) as caught:
        backward(found, Bucket(0, 1.0))
    assert caught.value.worker == "ps0"
    group.open.clear()
    with pytest.raises(WorkerLost):
        backward(found, Bucket(0, 1.0))
    assert not group.open  # Nothing was reduced.


def test_the_loss_of_others_or_of_a_former_worker_makes_no_difference(group: Group) -> None:
    found = made()
    lose(found, "a stranger")
    lose(found, "back")  # A worker of this name is there again.
    found._changed = Waits(group.end)
    assert backward(found, Bucket(0, 1.0))[0].done()
