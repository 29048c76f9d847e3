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
from torchweft.observe.tracing.notes import Names, Rows, TracingWatcher
from torchweft.observe.tracing.records import Created, Made, Served, read
from torchweft.rpc.serving import Call

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
        self.watcher = TracingWatcher(self.rows, Names())

    def records(self) -> list[Any]:
        self.rows.end()
        return read(self.rows.take(100))

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
    (made,) = noting.records()
    assert isinstance(made, Made)
    assert (made.callee, made.number, made.function) == (9, 12, f"{__name__}.work")
    assert (made.parent_caller, made.parent_number) == (3, 7)
    assert (made.is_async, made.failed) == (False, True)
    assert made.thread == threading.get_ident()
    assert made.started_s <= made.ended_s


def test_a_served_call_is_noted_before_it_is_answered() -> None:
    noting = Noting()
    call, answers = noting.begun()
    call("result", None)
    assert answers.told == [(7, "result", 1)]
    (served,) = noting.records()
    assert isinstance(served, Served)
    assert (served.arrived_s, served.caller, served.number) == (ARRIVED_S, 3, 7)
    assert served.arrived_s <= served.began_s
    assert (served.function, served.context_id, served.failed) == ("m.work", 5, False)
    assert served.ended_s <= served.answered_s
    call("again", None)
    assert len(noting.rows) == 0


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
    (created,) = noting.records()
    assert isinstance(created, Created)
    assert (created.owner, created.number, created.function) == (2, 8, f"{__name__}.work")


def test_watchers_may_watch_together() -> None:
    first, second = Noting(), Noting()
    both = first.made()
    both.watchers = (first.watcher, second.watcher)
    both.finish()
    assert len(first.records()) == len(second.records()) == 1


def test_the_newest_rows_are_kept_and_the_others_counted() -> None:
    noting = Noting(limit=3)
    for number in range(5):
        call, _ = noting.begun()
        call.function = f"m:work{number}".encode()
        call("result", None)
    assert noting.rows.end() == 2
    records = read(noting.rows.take(2)) + read(noting.rows.take(2))
    assert [each.function for each in records] == ["m.work2", "m.work3", "m.work4"]
    assert all(each.answered_s > each.ended_s for each in records)


def test_rows_of_all_kinds_are_taken_in_their_order() -> None:
    noting = Noting(limit=6)
    for number in range(3):
        call, _ = noting.begun()
        call("result", None)
        noting.watcher.creation_sent(noting.made(), ReferenceId(1, 2, number))
        noting.made().finish()
    assert noting.rows.end() == 3
    taken = noting.rows.take(2) + noting.rows.take(100)
    assert [each[0] for each in taken] == [3, 4, 5, 6, 7, 8]
    assert [type(each) for each in read(taken)] == [Served, Created, Made] * 2
    assert not noting.rows.take(1)


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
