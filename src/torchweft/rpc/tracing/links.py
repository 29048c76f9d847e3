"""Notes each message of the links of a worker, while they are traced."""

from __future__ import annotations

import time
from _thread import get_ident
from collections.abc import Callable, Sequence

from torchweft.protocol.observing.trace import RECEIVED, SENT
from torchweft.rpc.tracing.heads import head_in
from torchweft.rpc.tracing.rows import HEAD_OF_CONTROL, Rows
from torchweft.transport.link import Link
from torchweft.wire.frames import HEADER, HEADER_BYTES, Buffer, Frame

_clock: Callable[[], float] = time.monotonic
_SETTLE_S = 0.1
"""How long to wait for messages that are being written or read, before the counters are read."""
_LOOK_S = 0.002
"""For how long nothing arrives on a link that is settled."""


class TracedLinks:
    """The links of a worker whose messages are noted. Thread-safe.

    Args:
        rows: Takes the rows.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._counted_before: dict[Link, tuple[int, int, int]] = {}

    def begin(self, link: Link, peer: int) -> None:
        """Has the messages of a link noted from now on.

        Args:
            link: The link.
            peer: The id of the worker at its other end.
        """
        counted = (peer, link.bytes_sent, link.bytes_received)
        if self._counted_before.setdefault(link, counted) is counted:
            link.watcher = LinkNotes(self._rows, peer)

    def end(self) -> None:
        """Has no further message noted."""
        for link in list(self._counted_before):
            link.watcher = None

    def counted(self) -> list[tuple[int, int, int]]:
        """Returns the other worker of each link, and the bytes that it has sent and received.

        No further message is noted. Waits for those that are being written or read, for a limited
        time.
        """
        counted = []
        for link, (peer, sent, received) in list(self._counted_before.items()):
            link.drain(_SETTLE_S)  # A thread counts a message after it has written it,
            self._await_notes(link)  # and notes one after it has read it.
            link.watcher = None
            counted.append((peer, link.bytes_sent - sent, link.bytes_received - received))
        return counted

    def _await_notes(self, link: Link) -> None:
        """Waits until what was noted was written, and what was read was noted, for a while."""
        notes, limit_s, before = link.watcher, _clock() + _SETTLE_S, -1
        while _clock() < limit_s:
            received = link.bytes_received
            is_read = not (link.is_receiving or link.incoming or link.handling.locked())
            is_written = not (isinstance(notes, LinkNotes) and notes.unwritten)
            if received == before and is_read and is_written:
                return
            before = received
            time.sleep(_LOOK_S)


class LinkNotes:
    """Notes the messages of one link.

    A row is noted before its message is written: when the answer to a message has come, the row
    exists. The time at which the write had ended is noted afterwards.

    Args:
        rows: Takes the rows.
        peer: The id of the worker at the other end.
    """

    def __init__(self, rows: Rows, peer: int) -> None:
        self._rows = rows
        self._peer = peer
        self._note_frames = frames_noter(rows)
        self.unwritten = set[int]()
        """The rows of messages that are not written yet."""

    def sending(self, parts: Sequence[Buffer]) -> Sequence[int]:
        """Notes messages that are about to be written; returns their rows."""
        noted = note_parts(self._rows, list(parts), self._peer)
        self.unwritten.update(noted)
        return noted

    def sent(self, noted: Sequence[int]) -> None:
        """Notes that they are written."""
        now_s = _clock()
        for row in noted:
            self._rows.note_end((row, now_s))
        self.unwritten.difference_update(noted)

    def received(self, frame: Frame) -> None:
        """Notes a frame that was received."""
        self._note_frames((frame,), self._peer)


def frames_noter(rows: Rows) -> Callable[[Sequence[Frame], int], None]:
    """Returns what notes frames that were received from a worker."""
    note, number, clock, cuts = rows.note_fields, rows.number, _clock, HEAD_OF_CONTROL

    def note_frames(frames: Sequence[Frame], peer: int) -> None:
        now_s, thread = clock(), get_ident()
        for kind, flags, identity, control, buffers in frames:
            size = HEADER_BYTES + len(control)
            if buffers:
                size += sum([8 + len(each) for each in buffers])
            head = bytes(control[cuts[kind]])
            row = number()
            note((row, RECEIVED, now_s, thread, peer, size, kind, flags, identity, head, 0, 0, 0))

    return note_frames


def note_parts(rows: Rows, parts: list[Buffer], peer: int) -> list[int]:
    """Notes the frames in parts, each of which begins with a part; returns the rows' numbers."""
    numbers = []
    now_s, thread, place = _clock(), get_ident(), 0
    while place < len(parts):
        part = memoryview(parts[place])
        kind, _, count, control, _ = HEADER.unpack_from(part)
        begin = HEADER_BYTES + 8 * count
        least = begin + control
        size = len(part)
        place += 1
        if count and size == least:  # Otherwise its only buffer is in the same part.
            size += sum([len(each) for each in parts[place : place + count]])
            place += count
        head = bytes(part[:HEADER_BYTES]) + head_in(kind, part[begin:least])
        number = rows.number()
        rows.note_fields((number, SENT, now_s, thread, peer, size, head, 0, 0, 0, 0, 0, 0))
        numbers.append(number)
    return numbers
