"""Derives types of links, and of their parsers, that note each message.

Both change their classes when a trace begins, and back when it ends. Their own methods do the work.
"""

from __future__ import annotations

import time
from _thread import get_ident
from collections.abc import Callable, Sequence

from torchweft.protocol.observing.trace import RECEIVED, SENT
from torchweft.rpc.tracing.heads import head_in
from torchweft.rpc.tracing.rows import HEAD_OF_CONTROL, HEAD_OF_MESSAGE, Rows
from torchweft.transport.link import Link
from torchweft.wire.frames import HEADER, HEADER_BYTES, Buffer, Frame, FrameParser

_clock: Callable[[], float] = time.monotonic
_SETTLE_S = 0.1
"""How long to wait for messages that are being written, before the counters are read."""


class TracedLinks:
    """The links of a worker whose messages are noted. Thread-safe.

    Args:
        rows: Takes the rows.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._traced: dict[type[Link], type[Link]] = {}
        self._parser = traced_parser(rows)
        self._counted_before: dict[Link, tuple[int, int, int]] = {}
        self._plain: dict[Link, type[Link]] = {}

    def begin(self, link: Link, peer: int) -> None:
        """Has the messages of a link noted from now on.

        Args:
            link: The link.
            peer: The id of the worker at its other end.
        """
        counted = (peer, link.bytes_sent, link.bytes_received)
        if self._counted_before.setdefault(link, counted) is not counted:
            return  # Another thread has begun it: the link was made just now.
        base, parser = type(link), link.parser
        if base not in self._traced:
            self._traced[base] = traced_link(base, self._rows)
        self._plain[link] = base
        for each in (link, parser):
            vars(each)["traced_peer"] = peer
        parser.__class__ = self._parser
        link.__class__ = self._traced[base]

    def end(self) -> None:
        """Has no further message noted."""
        for link, plain in list(self._plain.items()):
            link.__class__ = plain
            link.parser.__class__ = FrameParser

    def counted(self) -> list[tuple[int, int, int]]:
        """Returns the other worker of each link, and the bytes that it has sent and received.

        Waits for messages that are being written, for a limited time.
        """
        counted = list(self._counted_before.items())
        for link, _ in counted:  # A thread counts a message after it has written it.
            link.drain(_SETTLE_S)
        return [
            (peer, link.bytes_sent - sent, link.bytes_received - received)
            for link, (peer, sent, received) in counted
        ]


def traced_link(base: type[Link], rows: Rows) -> type[Link]:
    """Returns a subclass of a type of links that notes messages.

    A row is noted before its message is written: when the answer to a message has come, the row
    exists. The time at which the write had ended is noted afterwards.

    Args:
        base: ``Link`` or a subclass.
        rows: Takes the rows.
    """
    note, note_end, number = rows.note_fields, rows.note_end, rows.number
    clock, cuts = _clock, HEAD_OF_MESSAGE
    send, hold, end_own = base.send, base.hold, base.end_own

    class Traced(base):  # type: ignore[valid-type, misc]
        """A link whose messages are noted."""

        def send(self, parts: list[Buffer], *, may_block: bool) -> None:
            part = parts[0]
            cut = cuts[part[0]]
            # Neither buffers behind the message, nor their sizes in front of it.
            if cut is not None and len(parts) == 1 and not part[2]:
                row = number()
                peer = self.traced_peer
                size, kept = len(part), part[cut]
                note((row, SENT, clock(), get_ident(), peer, size, kept, 0, 0, 0, 0, 0, 0))
                send(self, parts, may_block=may_block)
                note_end((row, clock()))
            else:
                noted = note_parts(rows, parts, self.traced_peer)
                send(self, parts, may_block=may_block)
                now_s = clock()
                for row in noted:
                    note_end((row, now_s))

        def hold(self, parts: list[Buffer]) -> int:
            note_parts(rows, parts, self.traced_peer)
            count: int = hold(self, parts)
            return count

        def end_own(self, frames: Sequence[Frame], reader: list[int], consumed: list[int]) -> None:
            # Otherwise another thread receives these frames once more, and the parser notes them.
            if self.set_aside:
                note_frames(self.set_aside, self.traced_peer)
            note_frames(frames, self.traced_peer)
            end_own(self, frames, reader, consumed)

    note_frames = frames_noter(rows)
    return Traced


def traced_parser(rows: Rows) -> type[FrameParser]:
    """Returns a type of parsers that notes the frames in what was received."""
    received, note_frames = FrameParser.received, frames_noter(rows)

    class Traced(FrameParser):
        """A parser whose frames are noted."""

        traced_peer: int

        def received(self, size_bytes: int) -> list[Frame]:
            frames = received(self, size_bytes)
            if frames:
                note_frames(frames, self.traced_peer)
            return frames

    return Traced


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
