"""Frames: how messages follow one another on a connection.

A frame is a fixed header, the lengths of its buffers, a control part, and the buffers::

    kind u8 | flags u8 | buffer count u16 | control length u32 | id u64
    buffer length u64, once a buffer
    control part
    buffers, one after the other

The control part is the message; the buffers are the memory of tensors. A frame that fits the
receive buffer is parsed out of it. Every part of a larger frame is received straight into its own
memory, so that a large tensor is copied once, by the kernel. Lengths are checked against the limits
before memory is allocated, and memory is allocated as the frame arrives: a header that announces
much and is followed by nothing costs little. The receive buffer grows if it cannot hold a header
and its lengths, which are at most half a megabyte.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchweft.errors import ProtocolError

HEADER = struct.Struct("<BBHIQ")
HEADER_BYTES = HEADER.size
MAX_BUFFERS = 0xFFFF
_AHEAD_BYTES = 64 << 20
_OWN_CONTROL_BYTES = 1 << 20
"""Larger control parts are received into memory of the same kind as buffers."""
_LENGTH = struct.Struct("<Q")

Buffer = bytes | bytearray | memoryview
Allocate = Callable[[int], memoryview]


class Frame(NamedTuple):
    """One received frame. Its holder owns the control part and buffers."""

    kind: int
    flags: int
    id: int
    control: Buffer
    buffers: Sequence[Buffer]


def encode_frame(
    kind: int, flags: int, frame_id: int, control: bytes, buffers: Sequence[memoryview] = ()
) -> list[Buffer]:
    """Returns the pieces to write for one frame: header with control, then the buffers."""
    if not buffers:
        return [HEADER.pack(kind, flags, 0, len(control), frame_id) + control]
    count = len(buffers)
    if count > MAX_BUFFERS:
        raise ProtocolError(f"a message has {count} tensors; at most {MAX_BUFFERS} fit one message")
    lengths = struct.pack(f"<{count}Q", *[buffer.nbytes for buffer in buffers])
    header = HEADER.pack(kind, flags, count, len(control), frame_id)
    return [header + lengths + control, *buffers]


class FrameParser:
    """Cuts a connection's byte stream into frames, without doing any I/O itself.

    The owner receives into ``space()`` and reports the count to ``received()``.

    Args:
        allocate: Returns writable memory of a size in bytes, for the parts of large frames.
        receive_bytes: Size of the receive buffer; smaller frames are parsed out of it.
        control_limit_bytes: Largest control part accepted.
        frame_limit_bytes: Largest frame accepted, buffers included.
        ahead_bytes: No further buffer is allocated while this much memory is not filled yet.
    """

    def __init__(
        self,
        allocate: Allocate,
        receive_bytes: int,
        control_limit_bytes: int,
        frame_limit_bytes: int,
        ahead_bytes: int = _AHEAD_BYTES,
    ) -> None:
        self._allocate = allocate
        self._capacity = receive_bytes
        # A frame without buffers is its control part.
        self._control_limit_bytes = min(control_limit_bytes, frame_limit_bytes - HEADER_BYTES)
        self._frame_limit_bytes = frame_limit_bytes
        self._ahead_bytes = ahead_bytes
        # Pages that no message has reached take no memory; a bytearray is filled with zeros.
        self._view = memoryview(mmap.mmap(-1, receive_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._start = 0
        self._end = 0
        self.large: _LargeFrame | None = None
        """The frame, if any, whose rest ``space()`` is: it is received into its own memory."""

    def space(self) -> list[memoryview]:
        """Returns the memory to receive the next bytes into, in order; never empty."""
        if self.large is not None:
            return self.large.missing
        return [self._view[self._end :]]

    @property
    def is_idle(self) -> bool:
        """Whether no frame has begun."""
        return self.large is None and not self._end

    def received(self, size_bytes: int) -> list[Frame]:
        """Notes ``size_bytes`` received into ``space()``; returns the frames now complete.

        Raises:
            ProtocolError: A frame exceeds the limits. The connection is then unusable.
        """
        if self.large is not None:
            if not self.large.fill(size_bytes):
                return []
            frame, self.large = self.large.frame(), None
            return [frame]
        self._end += size_bytes
        frames: list[Frame] = []
        while self._end - self._start >= HEADER_BYTES:
            size = self._parse_one(frames)
            if not size:
                break
            self._start += size
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            self._compact()
        return frames

    def _parse_one(self, frames: list[Frame]) -> int:
        """Appends the next frame if it is complete; returns the bytes it took from the buffer."""
        start, available = self._start, self._end - self._start
        header: tuple[int, int, int, int, int] = HEADER.unpack_from(self._view, start)
        kind, flags, count, control_bytes, frame_id = header
        control_start = start + HEADER_BYTES + 8 * count
        if control_bytes > self._control_limit_bytes:
            raise ProtocolError(
                f"a frame announces a control part of {control_bytes} bytes; "
                f"the limit is {self._control_limit_bytes}"
            )
        body_start = control_start + control_bytes
        if available < HEADER_BYTES + 8 * count:
            self._ensure_capacity(HEADER_BYTES + 8 * count)
            return 0
        lengths: tuple[int, ...] = struct.unpack_from(
            f"<{count}Q", self._view, start + HEADER_BYTES
        )
        size = body_start - start + sum(lengths)
        if size > self._frame_limit_bytes:
            raise ProtocolError(
                f"a frame announces {size} bytes; the limit is {self._frame_limit_bytes}"
            )
        if size <= available:
            control = bytes(self._view[control_start:body_start])
            buffers = self._copy_out(body_start, lengths) if count else ()
            frames.append(Frame(kind, flags, frame_id, control, buffers))
            return size
        if size <= self._capacity:
            return 0
        return self._begin_large(Frame(kind, flags, frame_id, b"", ()), control_bytes, lengths)

    def _ensure_capacity(self, size_bytes: int) -> None:
        if size_bytes > self._capacity:
            grown = memoryview(bytearray(size_bytes))
            grown[: self._end] = self._view[: self._end]
            self._view, self._capacity = grown, size_bytes

    def _copy_out(self, start: int, lengths: Sequence[int]) -> list[bytearray]:
        buffers = []
        for length in lengths:
            buffers.append(bytearray(self._view[start : start + length]))
            start += length
        return buffers

    def _begin_large(self, head: Frame, control_bytes: int, lengths: Sequence[int]) -> int:
        """Allocates memory for the parts of a large frame and moves the received bytes there."""
        header_bytes = HEADER_BYTES + 8 * len(lengths)
        sizes = (control_bytes, *lengths)
        large = _LargeFrame(head, sizes, self._allocate, self._ahead_bytes)
        arrived = self._view[self._start + header_bytes : self._end]
        while arrived:
            part = large.missing[0]
            size = min(len(part), len(arrived))
            part[:size] = arrived[:size]
            arrived = arrived[size:]
            large.fill(size)
        self.large = large
        return self._end - self._start

    def _compact(self) -> None:
        """Moves an incomplete frame to the front, so that the rest of it has room."""
        remainder = bytes(self._view[self._start : self._end])
        self._view[: len(remainder)] = remainder
        self._start, self._end = 0, len(remainder)


class _LargeFrame:
    """A frame whose parts are being received into their own memory.

    Args:
        head: The frame without its parts.
        sizes: The sizes of the control part and of the buffers.
        allocate: Returns memory for a part.
        ahead_bytes: How much unfilled memory there may be before a further part is allocated.
    """

    def __init__(
        self, head: Frame, sizes: Sequence[int], allocate: Allocate, ahead_bytes: int
    ) -> None:
        self._head = head
        self._sizes = sizes
        self._allocate = allocate
        self._ahead_bytes = ahead_bytes
        self._unfilled_bytes = 0
        self._parts: list[memoryview] = []
        self.missing: list[memoryview] = []
        self._take_memory()

    def _take_memory(self) -> None:
        """Allocates memory for the next parts: for at least one, if any is left."""
        sizes, parts = self._sizes, self._parts
        while len(parts) < len(sizes):
            if self.missing and self._unfilled_bytes >= self._ahead_bytes:
                return
            size = sizes[len(parts)]
            is_own = not size or (not parts and size <= _OWN_CONTROL_BYTES)
            part = memoryview(bytearray(size)) if is_own else self._allocate(size)
            parts.append(part)
            if size:
                self.missing.append(part)
                self._unfilled_bytes += size

    def fill(self, size_bytes: int) -> bool:
        """Notes received bytes; returns whether the frame is complete."""
        self._unfilled_bytes -= size_bytes
        while size_bytes:
            part = self.missing[0]
            if size_bytes < part.nbytes:
                self.missing[0] = part[size_bytes:]
                return False
            size_bytes -= part.nbytes
            del self.missing[0]
        if len(self._parts) < len(self._sizes):
            self._take_memory()
        return not self.missing

    def frame(self) -> Frame:
        return self._head._replace(control=self._parts[0], buffers=self._parts[1:])
