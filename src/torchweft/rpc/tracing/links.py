"""Derives types of links that note each message.

A link changes its class when a trace begins, and back when it ends. Its own methods do the work.
"""

from __future__ import annotations

import time
from _thread import get_ident
from collections.abc import Callable, Sequence
from typing import Any

from torchweft.protocol.observing.trace import RECEIVED, SENT
from torchweft.rpc.tracing.heads import LENGTHS, head_in
from torchweft.rpc.tracing.rows import PACK_SENT, SENT_ENDED, pack_received, pack_sent, set_time
from torchweft.transport.link import Link
from torchweft.transport.spinning import Spinning
from torchweft.wire.frames import HEADER, HEADER_BYTES, Buffer, Frame

Note = Callable[[Any], None]
Number = Callable[[], int]


class TracedLink(Link):
    """What the derived types have in common: for the parts that switch a trace on and off."""

    traced_peer: int
    """The id of the worker at the other end."""
    traced_own: Sequence[Frame]
    """What ``receive_own`` returned last."""


def traced_link(base: type[Link], note: Note, number: Number) -> type[TracedLink]:
    """Returns a subclass of a type of links that notes messages.

    A row is noted before its message is written: when the answer to a message has come, the row
    exists. The time at which the write had ended is set afterwards.

    Args:
        base: ``Link`` or a subclass.
        note: Takes a row; atomic.
        number: Returns the next number of a row.
    """
    clock: Callable[[], float] = time.monotonic
    fast, usual = PACK_SENT, LENGTHS
    send, hold = base.send, base.hold
    receive, receive_spinning = base.receive, base.receive_spinning
    receive_own, end_own = base.receive_own, base.end_own

    class Traced(base):  # type: ignore[valid-type, misc]
        """A link whose messages are noted."""

        def send(self, parts: list[Buffer], *, may_block: bool) -> None:
            part = parts[0]
            pack = fast[part[0]]
            # Neither buffers behind the message, nor their sizes in front of it.
            if pack is not None and len(parts) == 1 and not part[2]:
                now_s, peer = clock(), self.traced_peer
                size = len(part)
                row = bytearray(pack(SENT, number(), now_s, now_s, get_ident(), peer, size, part))
                note(row)
                send(self, parts, may_block=may_block)
                set_time(row, SENT_ENDED, clock())
            else:
                rows = note_parts(parts, self.traced_peer)
                send(self, parts, may_block=may_block)
                now_s = clock()
                for row in rows:
                    set_time(row, SENT_ENDED, now_s)

        def hold(self, parts: list[Buffer]) -> int:
            note_parts(parts, self.traced_peer)
            count: int = hold(self, parts)
            return count

        def receive(self, *, may_block: bool) -> list[Frame]:
            frames: list[Frame] = receive(self, may_block=may_block)
            if frames:
                note_frames(frames, self.traced_peer)
            return frames

        def receive_spinning(self, spinning: Spinning) -> list[Frame]:
            frames: list[Frame] = receive_spinning(self, spinning)
            if frames:
                note_frames(frames, self.traced_peer)
            return frames

        def receive_own(self, *, may_block: bool) -> list[Frame] | None:
            # Noted by ``end_own``: without it, another thread receives these frames once more.
            frames: list[Frame] | None = receive_own(self, may_block=may_block)
            self.traced_own = frames or ()
            return frames

        def end_own(self, consumed: list[int]) -> None:
            note_frames(self.traced_own, self.traced_peer)
            end_own(self, consumed)

    def note_parts(parts: list[Buffer], peer: int) -> list[bytearray]:
        """Notes the frames in parts, each of which begins with a part."""
        rows = []
        now_s, thread, place = clock(), get_ident(), 0
        while place < len(parts):
            part = memoryview(parts[place])
            kind, flags, count, control, _ = HEADER.unpack_from(part)
            begin = HEADER_BYTES + 8 * count
            least = begin + control
            size = len(part)
            place += 1
            if count and size == least:  # Otherwise its only buffer is in the same part.
                size += sum([len(each) for each in parts[place : place + count]])
                place += count
            row = bytearray(pack_sent(SENT, number(), now_s, now_s, thread, peer, size))
            row += part[:HEADER_BYTES]
            row += head_in(kind, flags, part[begin:least])
            note(row)
            rows.append(row)
        return rows

    def note_frames(frames: Sequence[Frame], peer: int) -> None:
        now_s, thread = clock(), get_ident()
        for kind, flags, identity, control, buffers in frames:
            length = usual.get(kind)
            head = bytes(control[:length]) if length else head_in(kind, flags, control)
            size = HEADER_BYTES + len(control)
            if buffers:
                size += sum([8 + len(each) for each in buffers])
            front = pack_received(
                RECEIVED, number(), now_s, thread, peer, size, kind, flags, identity
            )
            note(front + head)

    return Traced
