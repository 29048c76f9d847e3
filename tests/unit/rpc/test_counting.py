from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest

from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import ERROR_REPLY, Kind
from torchweft.engine.worker.calls import PendingCall
from torchweft.rpc import counting
from torchweft.rpc.counting import OTHERS, Tally
from torchweft.rpc.functions import batched
from torchweft.rpc.watching import Names, key_of


def work() -> None: ...


class Model:
    def forward(self) -> None: ...


REPLY = Frame(Kind.REPLY, 0, 1, b"", ())
FAILURE = Frame(Kind.REPLY, ERROR_REPLY, 1, b"", ())


def ended(tally: Tally, function: Any, frame: Frame | None = REPLY) -> None:
    call = PendingCall(1, "worker1", function, 5.0)
    call.frame = frame
    tally.note_made(call)


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


def test_the_number_of_functions_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "MOST_FUNCTIONS", 2)
    tally = Tally("out")
    for name in (b"m:a", b"m:b", b"m:c", b"m:d", b"m:d"):
        ended(tally, name)
    found = {each.function: each.calls for each in tally.counts()}
    assert found == {"m.a": 1, "m.b": 1, OTHERS: 3}
