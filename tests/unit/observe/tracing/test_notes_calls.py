"""What is noted of calls, without a group."""

from __future__ import annotations

import functools
import gc
import math
import threading
import time
import weakref
from typing import Any

import pytest

from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import ERROR_REPLY, Kind
from torchweft.engine.worker.calls import PendingCall
from torchweft.ids import ReferenceId
from torchweft.observe.tracing.notes import CREATED, MADE, SERVED, Rows, TracingWatcher
from torchweft.rpc.serving import Call
from torchweft.rpc.watching import Names

REQUEST = Frame(Kind.CALL, 0, 7, b"", ())
ARRIVED_S = time.monotonic()


def work() -> None: ...


class Caller:
    id, name, lost = 3, "caller", None

    def __init__(self) -> None:
        self.served: dict[int, Any] = {}


class Answers:
    """Takes the answers of calls; the row of a call exists before it is answered."""

    def __init__(self, rows: Rows, watcher: TracingWatcher) -> None:
        self.rows, self.told = rows, []  # type: ignore[var-annotated]
        self.watchers = (watcher,)

    def reply(self, peer: Any, number: int, result: Any, context_id: int) -> None:
        self.told.append((number, result, len(self.rows)))

    def reply_error(self, peer: Any, number: int, error: BaseException) -> None:
        self.told.append((number, error, len(self.rows)))


class Noting:
    def __init__(self, limit: int = 100) -> None:
        self.rows = Rows(limit)
        self.watcher = TracingWatcher(self.rows)

    def noted(self) -> list[Any]:
        return [row[1:] for row in self.rows.end()[0]]

    def served(self) -> tuple[Any, Answers]:
        call: Any = Call(Caller(), REQUEST, ARRIVED_S)
        answers = Answers(self.rows, self.watcher)
        call.worker, call.owned, call.function, call.context_id = answers, None, b"m:work", 5
        return call, answers

    def begun(self) -> tuple[Any, Answers]:
        call, answers = self.served()
        call.notes = {}
        self.watcher.serving_begins(call)
        assert call.begins(-1, math.inf, time.monotonic())
        return call, answers

    def made(self, parent: Any = None) -> PendingCall:
        call = PendingCall(9, "callee", work, 5.0, None, parent)
        call.watchers, call.notes = (self.watcher,), {}
        self.watcher.call_begins(call)
        return call


@pytest.mark.parametrize("frame", [None, Frame(Kind.REPLY, ERROR_REPLY, 1, b"", ())])
def test_a_call_is_noted_when_it_ends(frame: Frame | None) -> None:
    noting = Noting()
    parent, _ = noting.served()
    call = noting.made(parent)
    call.number, call.frame = 12, frame
    assert len(noting.rows) == 0
    call.finish()
    assert call.is_done
    ((tag, began_s, ended_s, thread, *made),) = noting.noted()
    assert tag == MADE
    assert made == [9, 12, f"{__name__}.work", 3, 7, False, True]
    assert thread == threading.get_ident()
    assert began_s <= ended_s


def test_a_served_call_is_noted_before_it_is_answered() -> None:
    noting = Noting()
    call, answers = noting.begun()
    call("result", None)
    assert answers.told == [(7, "result", 1)]
    call("again", None)
    assert len(noting.rows) == 1
    rows, ends, dropped = noting.rows.end()
    ((number, tag, arrived_s, began_s, ended_s, _, _, *served),) = rows
    assert (tag, arrived_s, dropped) == (SERVED, ARRIVED_S, 0)
    assert served == [3, 7, -1, "m.work", 5, False]
    assert arrived_s <= began_s <= ended_s <= ends[number]


def test_a_call_that_fails_before_its_turn_is_answered_all_the_same() -> None:
    noting = Noting()
    call, answers = noting.served()
    error = MemoryError()
    call.fail(error)
    assert answers.told == [(7, error, 0)]
    assert call.has_ended
    assert len(noting.rows) == 0


def test_a_made_value_is_noted_with_its_reference() -> None:
    noting = Noting()
    noting.watcher.creation_sent(noting.made(), ReferenceId(1, 2, 8))
    ((tag, _, _, *created),) = noting.noted()
    assert (tag, *created) == (CREATED, 2, 8, f"{__name__}.work")


def test_watchers_may_watch_together() -> None:
    first, second = Noting(), Noting()
    both = first.made()
    both.watchers = (first.watcher, second.watcher)
    both.finish()
    assert len(first.noted()) == len(second.noted()) == 1


def test_the_newest_rows_are_kept_and_the_others_counted() -> None:
    noting = Noting(limit=3)
    for number in range(5):
        call, _ = noting.begun()
        call.function = f"m:work{number}".encode()
        call("result", None)
    rows, ends, dropped = noting.rows.end()
    assert dropped == 2
    assert [row[-3] for row in rows] == ["m.work2", "m.work3", "m.work4"]
    assert all(ends[row[0]] > row[4] for row in rows)


def test_rows_are_not_tracked_by_the_garbage_collector() -> None:
    """Kept objects that it tracks would make each collection longer."""
    noting = Noting()
    call, _ = noting.begun()
    call("result", None)
    noting.made().finish()
    noting.watcher.creation_sent(noting.made(), ReferenceId(1, 2, 8))
    gc.collect()
    kept = [*noting.rows._rows, *noting.rows._ends]
    assert len(kept) == 4
    assert not any(map(gc.is_tracked, kept))


def test_names_keep_no_captured_value_alive() -> None:
    class Value: ...

    value = Value()
    watched = weakref.ref(value)
    names = Names()
    made = [lambda value=value: value, functools.partial(work, value), [value].append]
    found = [names.name_of(each) for each in made]
    assert found == [names.name_of(each) for each in made]
    assert len({*found}) == 3
    del value, made
    gc.collect()
    assert watched() is None
