"""The rows of one recording, of which each step of a call notes one.

While a call waits, as little as possible is done: numbers, times and the head of a message are kept
as they are. They are decoded when the rows are taken.

The fields of all rows stand one after the other in one ring. A tuple for each row would be one more
object to keep, and to look at for the garbage collector. A row is appended in one step of C, and no
lock is taken. A time that is known only later is noted beside it, under its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchweft.free_threading import shared_count
from torchweft.protocol.observing.trace import (
    CREATED,
    MADE,
    OFFERED,
    PULLED,
    RAN,
    RECEIVED,
    SENT,
    SERVED,
    Row,
)
from torchweft.rpc.tracing.heads import LENGTHS, context_of, ids_in
from torchweft.wire.frames import HEADER, HEADER_BYTES

Note = Callable[[Any], None]
Number = Callable[[], int]
Fields = list[Any]

WIDTH = 13
"""Fields of a row. Shorter rows are filled up, so that each old row gives way to one new row."""
_MADE_FIELDS, _SENT_FIELDS, _RECEIVED_FIELDS = 12, 7, 10
_FILLED_UP = (0,) * (WIDTH - 3)

HEAD_OF_CONTROL: Sequence[slice] = [slice(LENGTHS.get(kind, 0)) for kind in range(256)]
"""Cuts from a control part what is kept of it, by the kind of message."""


class Rows:
    """The newest rows of one recording. Thread-safe.

    Args:
        limit: How many are kept.

    Attributes:
        note_fields: Takes ``WIDTH`` fields: the number of the row of a call or message, its tag,
            other fields, and zeros.
        note_end: Takes the number of a row of a message or of a served call, and the time at which
            that was written or answered. Until then, that is the last time in the row.
        number: Returns the number of the next row.
    """

    def __init__(self, limit: int) -> None:
        self._fields: deque[Any] = deque(maxlen=limit * WIDTH)
        self._ends: deque[Any] = deque(maxlen=limit * 2)
        self._ended: dict[int, float] = {}
        self.note_fields: Note = self._fields.extend
        self.note_end: Note = self._ends.extend
        self.number: Number = shared_count().__next__

    def __len__(self) -> int:
        return len(self._fields) // WIDTH

    def note(self, row: Row) -> None:
        """Takes any other row: its number, its tag, and fields."""
        self.note_fields((*row[:2], row, *_FILLED_UP))

    def end(self) -> int:
        """Is called once, when no new row is noted; returns how many rows were dropped."""
        return self.number() - len(self)

    def take(self, count: int) -> list[Row]:
        """Takes out the oldest rows, as they travel: with the fields of their records."""
        while self._ends:  # A thread may still note the end of its last message.
            number = self._ends.popleft()
            self._ended[number] = self._ends.popleft()
        pop, width = self._fields.popleft, range(WIDTH)
        taken = [[pop() for _ in width] for _ in range(min(count, len(self)))]
        return [_COMPLETE[row[1]](row, self._ended) for row in taken]


def _made(row: Fields, _: Mapping[int, float]) -> Row:
    return tuple(row[:_MADE_FIELDS])


def _served(row: Fields, ended: Mapping[int, float]) -> Row:
    number, tag, arrived_s, began_s, ended_s, *fields, context_id, failed = row
    answered_s = ended.get(number, ended_s)
    context_id = context_of(context_id)
    return (number, tag, arrived_s, began_s, ended_s, answered_s, *fields, context_id, failed)


def _sent(row: Fields, ended: Mapping[int, float]) -> Row:
    number, tag, began_s, thread, peer, size_bytes, head = row[:_SENT_FIELDS]
    kind, flags, count, control_bytes, identity = HEADER.unpack_from(head)
    ids = ids_in(kind, flags, bytes(head[HEADER_BYTES:]), control_bytes)
    stream_bytes = size_bytes - HEADER_BYTES - 8 * count - control_bytes
    front = (number, tag, began_s, ended.get(number, began_s), thread, peer)
    told = (ids.context_id, ids.message_id, ids.creation, ids.inline_bytes, stream_bytes)
    return (*front, kind, identity, size_bytes, *told)


def _received(row: Fields, _: Mapping[int, float]) -> Row:
    *front, size_bytes, kind, flags, identity, head = row[:_RECEIVED_FIELDS]
    ids = ids_in(kind, flags, head, size_bytes - HEADER_BYTES)
    told = (ids.context_id, ids.message_id, ids.creation)
    return (*front, kind, identity, size_bytes, *told)


def _other(row: Fields, _: Mapping[int, float]) -> Row:
    whole: Row = row[2]
    return whole


_COMPLETE = {MADE: _made, SERVED: _served, SENT: _sent, RECEIVED: _received}
_COMPLETE |= dict.fromkeys((CREATED, OFFERED, PULLED, RAN), _other)
