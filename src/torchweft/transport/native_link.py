"""Links in C: they write, wait and cut frames in steps that no signal handler interrupts.

So the main thread writes its messages and reads its answers itself, as every other thread does. See
``native/link.c``. A frame that exceeds the receive buffer is left to the parser in Python, and so
is a connection with TLS.
"""

from __future__ import annotations

import os
import socket
import time
from _thread import get_ident
from collections.abc import Callable, Sequence
from typing import Any

from torchweft import knobs
from torchweft.errors import ProtocolError
from torchweft.native import native
from torchweft.threads import interrupts
from torchweft.transport.link import POLL_S, SEND_PATIENCE_S, Link, LinkClosed, shut, tune
from torchweft.transport.session import BreakListener, ResumableLink
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
        self._open(peer, keeps=False)

    def _open(self, peer: object, *, keeps: bool) -> None:
        assert native is not None
        frame_limit_bytes = knobs.FRAME_LIMIT_BYTES.get()
        self.native: Any = native.Link(
            self.read_fd,
            peer,
            self.incoming,
            keeps,
            knobs.RECEIVE_BUFFER_BYTES.get(),
            # A frame without buffers is its control part.
            min(knobs.CONTROL_LIMIT_BYTES.get(), frame_limit_bytes - HEADER_BYTES),
            frame_limit_bytes,
            knobs.SPIN_S.get(),
            knobs.LONG_SPIN_S.get(),
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
    def is_receiving(self) -> bool:
        """Whether a thread just receives; what it has counted may not be in ``incoming`` yet."""
        return bool(self.native.is_looking) or not self.parser.is_idle

    @property
    def has_queued(self) -> bool:
        """Whether anything waits to be written."""
        return bool(self.native.has_queued)

    # Writing

    def _send(self, parts: Sequence[Buffer], may_block: bool) -> None:
        try:
            is_written = self.native.write(parts, SEND_PATIENCE_S if may_block else 0.0)
        except OSError as error:
            self._cannot_write(error)
        except BaseException:  # A signal handler has raised, while the socket was full.
            self._when_full(self)
            raise
        else:
            if not is_written:
                self._when_full(self)

    def _cannot_write(self, error: OSError) -> None:
        self._is_closed = True
        raise LinkClosed(str(error)) from error

    def _hold(self, parts: list[Buffer]) -> int:
        return int(self.native.hold(parts))

    def write_held(self) -> None:
        if self.native.has_queued:
            self._send((), may_block=False)

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
            Link.receive(self, may_block=may_block)
            connection.is_large = not self.parser.is_idle
        if connection.is_large and self.parser.is_idle:
            self._begin_large(connection.take_data())

    def _read(self, may_spin: bool) -> None:
        try:
            count = self.native.read(may_spin)
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if count is None and not self.native.is_large:
            raise LinkClosed("the connection is closed" if self._is_closed else "end of file")

    def _begin_large(self, data: bytes) -> None:
        """Has the parser in Python take over at a frame of which some bytes have arrived."""
        view = memoryview(data)
        while view:
            space = self.parser.space()[0]
            size = min(len(space), len(view))
            space[:size] = view[:size]
            self.incoming.extend(self.parser.received(size))
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
        return self._wait_for_writer_to_end() and super().free()

    def _wait_for_writer_to_end(self) -> bool:
        limit_s = time.monotonic() + SEND_PATIENCE_S
        while self.native.is_writing:
            if time.monotonic() > limit_s:
                return False
            time.sleep(POLL_S)
        return True


class NativeResumableLink(NativeLink, ResumableLink):
    """One session with a peer, in the native twin; see ``ResumableLink``.

    Args:
        peer: As for ``NativeLink``.
    """

    def __init__(
        self,
        connection: socket.socket,
        parser: FrameParser,
        when_full: Callable[[Link], None],
        on_break: BreakListener,
        limit_bytes: int,
        peer: object,
    ) -> None:
        ResumableLink.__init__(self, connection, parser, when_full, on_break, limit_bytes)
        self._open(peer, keeps=True)

    @property
    def has_queued(self) -> bool:
        """Whether anything waits to be written."""
        return bool(self.native.has_queued) and not self._is_broken

    def _count(self) -> None:
        """Tells the session what the link in C has counted."""
        self._outgoing.position = self.native.position
        self._incoming.position = self.bytes_received

    def _send(self, parts: Sequence[Buffer], may_block: bool) -> None:
        self._count()
        if may_block and self._outgoing.kept_bytes > self._limit_bytes:
            if get_ident() == interrupts.main_id:
                self._wait_for_flush()
            else:
                self._wait_for_room()
        if self._incoming.is_due:
            self._hold_acknowledgement()
        NativeLink._send(self, parts, may_block)

    def _cannot_write(self, error: OSError) -> None:
        self._note_break(error)

    def flush(self) -> None:
        NativeLink.write_held(self)

    def _kept_bytes(self) -> int:
        self._count()
        return self._outgoing.kept_bytes

    def acknowledged(self, position: int) -> None:
        self._count()
        super().acknowledged(position)
        self.native.acknowledge(position)

    def receive(self, *, may_block: bool, may_spin: bool = False) -> None:
        if self._is_broken:
            self._wait_for_connection(may_block=may_block)
            return
        with self._receiving:
            try:
                if not self._is_broken:
                    NativeLink.receive(self, may_block=may_block, may_spin=may_spin)
            except LinkClosed as error:
                if self._is_closed:
                    raise
                self._note_break(error)
        self._count()
        if self._incoming.is_much:
            self.acknowledge()

    def _receive_some(self, flags: int) -> int:
        return Link._receive_some(self, flags)  # Counted by ``bytes_received``.

    def _note_break(self, error: OSError) -> None:
        self.native.is_broken = True
        super()._note_break(error)

    def stop(self) -> int:
        self.native.is_broken = True
        super().stop()
        while self.native.is_looking:  # A waiting thread finds the end, or the last bytes.
            time.sleep(POLL_S)
        return self.bytes_received

    def resume(self, connection: socket.socket, peer_position: int) -> None:
        shut(self._socket)  # Makes threads that read or write it return.
        with self._receiving, self._room:
            if self._is_closed:
                connection.close()
                raise LinkClosed("the session has ended")
            if not self._wait_for_writer_to_end():
                connection.close()
                raise LinkClosed("a thread still writes to the connection before")
            self._count()
            try:
                self._outgoing.since(peer_position)
            except ProtocolError:
                connection.close()
                raise
            self._outgoing.acknowledge(peer_position)
            self.native.acknowledge(peer_position)
            tune(connection)
            former, self._socket = self._socket, connection
            os.dup2(connection.fileno(), self.read_fd, inheritable=False)
            os.dup2(connection.fileno(), self.write_fd, inheritable=False)
            former.close()
            self.native.resume(peer_position)
            self._is_broken = False
            self.resumption_count += 1
        self._resumed.set()

    def drain(self, timeout_s: float) -> None:
        ResumableLink.drain(self, timeout_s)

    def hang_up(self) -> None:
        self.native.close()
        ResumableLink.hang_up(self)

    def close(self) -> None:
        self.hang_up()
        self._wait_for_writer_to_end()
        self._release()
