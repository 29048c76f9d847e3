from __future__ import annotations

import functools
import gc
import math
import weakref
from typing import Any

import pytest

from tests.tables import cases
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import ERROR_REPLY, Kind
from torchweft.engine.worker.calls import PendingCall
from torchweft.reports import percentile
from torchweft.rpc import counting
from torchweft.rpc.counting import OTHERS, Tally
from torchweft.rpc.functions import batched
from torchweft.rpc.watching import Names, key_of, name_of


def work() -> None: ...


class Model:
    def forward(self) -> None: ...


REPLY = Frame(Kind.REPLY, 0, 1, b"", ())
FAILURE = Frame(Kind.REPLY, ERROR_REPLY, 1, b"", ())


def ended(tally: Tally, function: Any, frame: Frame | None = REPLY) -> None:
    call = PendingCall(1, "worker1", function, 5.0)
    call.frame = frame
    tally.note_made(call)


@cases(
    ("function", "name"),
    [
        (work, f"{__name__}.work"),
        (Model.forward, f"{__name__}.Model.forward"),
        (Model().forward, f"{__name__}.Model.forward"),
        (Model, f"{__name__}.Model"),
        (max, "builtins.max"),
        ([].append, "list.append"),
        (functools.partial(work), f"partial({__name__}.work)"),
        (b"module:Class.function", "module.Class.function"),
        ((print, 1, "forward"), "forward of a reference"),
        ("resend of tensors", "resend of tensors"),
    ],
)
def test_a_function_is_counted_under_its_name(function: Any, name: str) -> None:
    tally = Tally("out")
    for _ in range(3):
        ended(tally, function)
    ended(tally, function, FAILURE)
    ended(tally, function, None)
    (counted,) = tally.counts()
    assert counted.function == name
    assert (counted.calls, counted.errors, counted.direction) == (5, 2, "out")
    assert sum(counted.times.values()) == 5
    assert 0 < percentile(counted.times, 0.99) < 5.0


def test_counts_grow_and_are_collected_once() -> None:
    tally = Tally("in")
    assert tally.counts() == []
    ended(tally, work)
    assert [each.calls for each in tally.counts()] == [1]
    ended(tally, work)
    tally.collect()
    tally.collect()
    assert [each.calls for each in tally.counts()] == [2]


def test_calls_without_an_end_have_no_time() -> None:
    tally = Tally("out")
    tally.entry_of(work).untimed.append(0.0)
    (counted,) = tally.counts()
    assert (counted.calls, counted.errors, counted.times) == (1, 0, {})
    assert math.isnan(percentile(counted.times, 0.5))


def test_counting_keeps_no_captured_value_alive() -> None:
    class Value: ...

    value = Value()
    watched = weakref.ref(value)
    tally = Tally("out")
    ended(tally, lambda value=value: value)
    ended(tally, [value].append)
    ended(tally, functools.partial(work, value))
    del value
    gc.collect()
    assert watched() is None
    assert sum(each.calls for each in tally.counts()) == 3


def test_functions_with_the_same_decorator_are_told_apart() -> None:
    @batched
    def first() -> None: ...

    @batched
    def second() -> None: ...

    class Owner:
        @batched
        def method(self) -> None: ...

    assert len({key_of(each) for each in (first, second, Owner.method)}) == 3
    assert key_of(Owner().method) == key_of(Owner.method)
    names = Names()
    found = [names.name_of(each).split(".")[-1] for each in (first, second, first)]
    assert found == ["first", "second", "first"]


def test_two_lambdas_of_one_line_are_two_functions() -> None:
    first, second = (lambda: 1), (lambda: 2)
    assert key_of(first) != key_of(second)
    assert name_of(first) == name_of(second)
    tally = Tally("out")
    ended(tally, first)
    ended(tally, second)
    assert [each.calls for each in tally.counts()] == [2]  # They have one name.


def test_the_number_of_functions_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "MOST_FUNCTIONS", 2)
    tally = Tally("out")
    for name in (b"m:a", b"m:b", b"m:c", b"m:d", b"m:d"):
        ended(tally, name)
    found = {each.function: each.calls for each in tally.counts()}
    assert found == {"m.a": 1, "m.b": 1, OTHERS: 3}
