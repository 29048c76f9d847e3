"""Deadlines travel with calls: the time left to a function, and to its nested calls."""

from __future__ import annotations

import math

import pytest

from tests.contract.processes import functions, timing
from tests.contract.processes.functions import raised_by, wait_until
from torchweft import rpc
from torchweft.errors import CallTimeout
from torchweft.launch import Cluster

DEFAULT_S = 20.0

pytestmark = pytest.mark.keeps("threads", "descriptors")


def left(*args: object, **kwargs: object) -> float:
    return rpc.rpc_sync("worker0", timing.time_left, *args, **kwargs)  # type: ignore[arg-type]


def test_a_function_is_told_how_long_its_caller_waits(group: Cluster) -> None:
    assert 0.0 < left(timeout=7.0) <= 7.0
    assert 7.0 < left() <= DEFAULT_S
    assert left(timeout=0) == math.inf
    assert 7.0 < rpc.rpc_sync("worker0", timing.time_left, kwargs={}) <= DEFAULT_S
    reference = rpc.remote("worker0", timing.Value)
    assert 0.0 < reference.rpc_sync(timeout=7.0).time_left() <= 7.0


def test_who_was_not_called_has_all_the_time(group: Cluster) -> None:
    assert rpc.remaining_time() == math.inf
    assert not rpc.is_cancelled()


def test_a_value_is_wanted_without_a_limit(group: Cluster) -> None:
    assert rpc.remote("worker0", timing.time_left, timeout=7.0).to_here() == math.inf


def test_calls_to_oneself_have_a_limit_too(group: Cluster) -> None:
    assert 0.0 < rpc.rpc_sync("driver", timing.time_left, timeout=7.0) <= 7.0


def test_a_nested_call_has_no_more_time_than_its_caller(group: Cluster) -> None:
    for own_limit_s in (0.0, 15.0):
        args = ("worker1", own_limit_s)
        assert 0.0 < rpc.rpc_sync("worker0", timing.time_left_at, args=args, timeout=7.0) <= 7.0


def test_a_nested_call_may_have_less_time(group: Cluster) -> None:
    args = ("worker1", 3.0)
    assert 0.0 < rpc.rpc_sync("worker0", timing.time_left_at, args=args, timeout=7.0) <= 3.0


def test_a_detached_call_has_the_time_that_it_is_given(group: Cluster) -> None:
    assert rpc.rpc_sync("worker0", timing.call_detached, args=("worker1",), timeout=7.0) == math.inf


def test_coroutines_and_their_tasks_know_their_limit(group: Cluster) -> None:
    told = rpc.rpc_sync("worker0", timing.time_left_soon, timeout=7.0)
    assert len(told) == 3
    assert all(0.0 < each <= 7.0 for each in told)
    assert rpc.rpc_sync("worker0", timing.time_left_soon, timeout=0) == [math.inf] * 3


def test_what_goes_on_in_futures_knows_its_limit(group: Cluster) -> None:
    for function in (timing.time_left_afterwards, timing.time_left_of_a_nested_call):
        assert 0.0 < rpc.rpc_sync("worker0", function, args=("worker1",), timeout=7.0) <= 7.0


def test_the_limit_of_a_nested_call_names_whose_it_was(group: Cluster) -> None:
    error = raised_by(
        lambda: rpc.rpc_sync("worker0", timing.wait_nested, args=("worker1",), timeout=0.5)
    )
    rpc.rpc_sync("worker0", timing.note, args=("the caller's end",))
    assert isinstance(error, CallTimeout)
    assert "wait_nested" in str(error)
    assert "longer timeout= if the function needs the time" in str(error)
    wait_until(
        lambda: len(rpc.rpc_sync("worker0", timing.noted, args=("refused",))) == 3,
        lambda: "the nested call has not ended",
    )
    (nested,) = rpc.rpc_sync("worker0", timing.noted, args=("nested",))
    refused = rpc.rpc_sync("worker0", timing.noted, args=("refused",))
    # Either may come first: the limit expires on both workers, or the caller says that it gave up.
    for late in (nested, *refused):
        assert "'driver'" in str(late)
        assert "waits no longer" in str(late) or "has given up" in str(late)
    rpc.rpc_sync("worker1", functions.open_gate, args=("never",))
    assert rpc.rpc_sync("worker1", timing.noted, args=("must not run",)) == []
