"""The link in C: it writes, waits and cuts frames in steps that no signal handler interrupts.

So the main thread writes its messages and reads its answers itself, as every other thread does. See
``native/link.c``. A frame that exceeds the receive buffer is left to the parser in Python.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from torchweft import knobs
from torchweft.native import native
from torchweft.transport.link import POLL_S, SEND_PATIENCE_S, Link, LinkClosed
from torchweft.wire.frames import HEADER_BYTES, Buffer, FrameParser


class NativeLink(Link):
    """One connection to a peer, in the native twin; see ``Link``.

    Args:
        peer: The peer, which threads with a lease get with each frame.

    Attributes:
        native: The connection in C.
    """

    may_spin = True

    def __init__(
        self,
        connection: socket.socket,
        parser: FrameParser,
        when_full: Callable[[Link], None],
        peer: object,
    ) -> None:
        super().__init__(connection, parser, when_full)
        assert native is not None
        frame_limit_bytes = knobs.FRAME_LIMIT_BYTES.get()
        spins = knobs.SPIN_S.get(), knobs.LONG_SPIN_S.get()
        self.native: Any = native.Link(
            self.read_fd,
            peer,
            self.incoming,
            False,
            knobs.RECEIVE_BUFFER_BYTES.get(),
            # A frame without buffers is its control part.
            min(knobs.CONTROL_LIMIT_BYTES.get(), frame_limit_bytes - HEADER_BYTES),
            frame_limit_bytes,
            *spins,
        )

    @property
    def bytes_sent(self) -> int:
        """How many bytes were written."""
        return int(self.native.bytes_sent)

    @property
    def bytes_received(self) -> int:
        """How many bytes were read."""
        return self._bytes_received + int(self.native.bytes_received)

    @property
    def has_queued(self) -> bool:
        """Whether anything waits to be written."""
        return bool(self.native.has_queued)

    # Writing

    def _send(self, parts: list[Buffer], may_block: bool) -> None:
        try:
            is_written = self.native.write(parts, SEND_PATIENCE_S if may_block else 0.0)
        except OSError as error:
            self._is_closed = True
            raise LinkClosed(str(error)) from error
        except BaseException:  # A signal handler has raised, while the socket was full.
            self._when_full(self)
            raise
        if not is_written:
            self._when_full(self)

    def _hold(self, parts: list[Buffer]) -> int:
        return int(self.native.hold(parts))

    def write_held(self) -> None:
        if self.native.has_queued:
            self._send([], may_block=False)

    # Reading

    def claim(self) -> bool:
        return bool(self.native.claim())

    def unclaim(self) -> None:
        self.native.unclaim()

    def receive(self, *, may_block: bool, may_spin: bool = False) -> None:
        connection = self.native
        if not connection.is_large:
            self._read(may_spin)
        elif not self.parser.is_idle:
            super().receive(may_block=may_block)
            connection.is_large = not self.parser.is_idle
        if connection.is_large and self.parser.is_idle:
            self._begin_large(connection.take_data())

    def _read(self, may_spin: bool) -> None:
        try:
            count = self.native.read(may_spin)
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if self.watcher is not None and count:
            self.watcher.received(list(self.incoming)[-count:])
        if count is None and not self.native.is_large:
            raise LinkClosed("the connection is closed" if self._is_closed else "end of file")

    def _begin_large(self, data: bytes) -> None:
        """Has the parser in Python take over at a frame of which some bytes have arrived."""
        view = memoryview(data)
        while view:
            space = self.parser.space()[0]
            size = min(len(space), len(view))
            space[:size] = view[:size]
            self._arrived(self.parser.received(size))
            view = view[size:]
        self.native.is_large = not self.parser.is_idle

    # The end

    def drain(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self._is_closed and time.monotonic() < deadline_s:
            if not (self.native.is_writing or self.native.has_queued):
                return
            time.sleep(POLL_S)

    def hang_up(self) -> None:
        self.native.close()
        super().hang_up()

    def free(self) -> bool:
        limit_s = time.monotonic() + SEND_PATIENCE_S
        while self.native.is_writing:
            if time.monotonic() > limit_s:
                return False
            time.sleep(POLL_S)
        return super().free()
