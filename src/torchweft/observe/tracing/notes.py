"""What a worker notes while it is traced: calls, messages, tensors, and parts of backward passes.

While a call waits, as little as possible is done: numbers, times and the head of a message are kept
as they are, in one plain tuple. ``slices`` reads them when the trace has ended.
"""

from __future__ import annotations

import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchweft.extending import IncomingCall, OutgoingCall, Watcher
from torchweft.free_threading import shared_count
from torchweft.ids import ReferenceId
from torchweft.observe.tracing.reading import BACKWARD, FETCH

Row = tuple[Any, ...]
"""A number, a tag, and fields: as ``note`` is called below, and as ``slices`` unpacks them."""

MADE, CREATED, SERVED, SENT, RECEIVED, OFFERED, PULLED, RAN = range(8)
"""The tags of the rows."""
NO_CREATION = -1
"""Stands in a row of a call that makes no value."""


class Rows:
    """The newest rows of one recording. Thread-safe: a row is appended in one step of C.

    Args:
        limit: How many are kept.
    """

    def __init__(self, limit: int) -> None:
        self._rows: deque[Row] = deque(maxlen=limit)
        self._ends: deque[tuple[int, float]] = deque(maxlen=limit)
        self._numbers = shared_count()

    def __len__(self) -> int:
        return len(self._rows)

    def note(self, tag: int, *fields: Any) -> int:
        """Takes a new row: its tag and fields; returns its number."""
        number = next(self._numbers)
        self._rows.append((number, tag, *fields))
        return number

    def note_end(self, number: int, at_s: float) -> None:
        """Takes the time at which the message or the answer of a row was written."""
        self._ends.append((number, at_s))

    def end(self) -> tuple[list[Row], dict[int, float], int]:
        """Is called once, when no new row is noted.

        Returns:
            The rows, the times of ``note_end`` by row, and how many rows were dropped.
        """
        rows = list(self._rows.copy())  # A thread may still note the end of its last message.
        return rows, dict(self._ends.copy()), next(self._numbers) - len(rows)


_clock: Callable[[], float] = time.monotonic


class TracingWatcher(Watcher):
    """Notes the calls, messages, tensors and parts of backward passes of one worker.

    A row is noted before its message is written: when the answer to a message has come, the row
    exists. The time at which the write had ended is noted afterwards.

    Args:
        rows: Takes the notes.
    """

    hears_messages = True

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def call_begins(self, call: OutgoingCall) -> bytes:
        """Keeps which thread makes a call."""
        call.notes[self] = get_ident()
        return b""

    def creation_sent(self, call: OutgoingCall, reference: ReferenceId) -> None:
        """Notes a call that makes a value."""
        name = self.names.name_of(call.function)
        self._rows.note(CREATED, _clock(), get_ident(), reference.owner, reference.number, name)

    def call_ends(self, call: OutgoingCall) -> None:
        """Notes a call at its caller."""
        function: Any = call.function
        parent = call.parent
        try:
            name = self.names.by_key[id(function.__code__)]
        except (AttributeError, KeyError):
            name = self.names.name_of(function)
        self._rows.note(
            MADE,
            call.started_s,
            _clock(),
            call.notes.get(self, 0),
            call.worker,
            call.number,
            name,
            -1 if parent is None else parent.peer.id,
            0 if parent is None else parent.number,
            call.on_done is not None,
            call.has_failed,
        )

    def serving_begins(self, call: IncomingCall) -> None:
        """Keeps when and where the turn of a call has come."""
        call.notes[self] = _Serving(_clock(), get_ident())

    def serving_ends(self, call: IncomingCall, error: BaseException | None) -> None:
        """Notes a served call before its caller goes on."""
        serving = self._serving(call)
        if serving is None or call.has_ended:
            return
        function: Any = call.function
        try:
            name = self.names.by_key[function]
        except (TypeError, KeyError):
            name = self.names.name_of(function)
        made = getattr(call, "reference", None)
        serving.row = self._rows.note(
            SERVED,
            call.arrived_s,
            serving.began_s,
            _clock(),
            serving.thread,
            get_ident(),
            call.peer.id,
            call.number,
            NO_CREATION if made is None else made.number,
            name,
            call.own_context_id,
            error is not None,
        )

    def served(self, call: IncomingCall, error: BaseException | None) -> None:
        """Notes when a call was answered."""
        serving = self._serving(call)
        if serving is not None and serving.row is not None:
            self._rows.note_end(serving.row, _clock())

    def _serving(self, call: IncomingCall) -> _Serving | None:
        notes: dict[Any, _Serving] = getattr(call, "notes", {})
        return notes.get(self)

    def part_runs(
        self,
        key: tuple[int, int],
        operations: Callable[[], dict[str, int]],
        work: Callable[[], tuple[list[Any], Any]],
    ) -> tuple[list[Any], Any]:
        """Notes a step of a part of a pass, with the names of its operations."""
        names = operations()
        began_s = _clock()
        outgoing, progress = work()
        if progress.executed or outgoing:
            ended_s = _clock()
            details = (
                ("operations", names),
                ("messages", tuple(progress.executed)),
                ("answered", tuple(progress.answered)),
            )
            name, context_id = next(iter(names), "leaves"), key[1]
            self.ran(began_s, ended_s, BACKWARD, name, context_id, details)
        return outgoing, progress

    def ran(
        self,
        began_s: float,
        ended_s: float,
        category: str,
        name: str,
        context_id: int,
        details: tuple[tuple[str, Any], ...],
    ) -> None:
        """Notes work of this thread that is no call; ``details`` are pairs of plain values."""
        self._rows.note(RAN, began_s, ended_s, get_ident(), category, name, context_id, details)

    # Messages, and tensors that go over other channels

    def sending(self, worker: int, notes: Sequence[Row]) -> list[int]:
        """Notes messages that are about to be written; returns their rows."""
        take, now_s, thread = self._rows.note, _clock(), get_ident()
        return [take(SENT, now_s, thread, worker, *note) for note in notes]

    def sent(self, noted: list[int]) -> None:
        """Notes that messages are written."""
        now_s = _clock()
        for row in noted:
            self._rows.note_end(row, now_s)

    def received(self, worker: int, note: Row) -> None:
        """Notes a message that was received."""
        self._rows.note(RECEIVED, _clock(), get_ident(), worker, *note)

    def fetched(self, worker: str, began_s: float) -> None:
        """Notes that tensors of a message have come, or could not be fetched."""
        self.ran(began_s, _clock(), FETCH, "tensors", 0, (("from", worker),))

    def offered(self, worker: int, kind: str, number: int, channels: Mapping[str, int]) -> None:
        """Notes tensors of a message that go over other channels than its connection."""
        told = tuple([(name.removeprefix("sent "), n) for name, n in channels.items() if n])
        self._rows.note(OFFERED, worker, kind, number, told)

    def pulled(self, channel: str, size_bytes: int) -> None:
        """Notes tensors that were fetched over a channel."""
        self._rows.note(PULLED, _clock(), get_ident(), channel, size_bytes)


class _Serving:
    """What is kept of a served call until it is answered.

    Attributes:
        began_s: When its turn came.
        thread: The thread in which it began.
        row: Its row, once it has an outcome.
    """

    __slots__ = ("began_s", "row", "thread")

    def __init__(self, began_s: float, thread: int) -> None:
        self.began_s = began_s
        self.thread = thread
        self.row: int | None = None
