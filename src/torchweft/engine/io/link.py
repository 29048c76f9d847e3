"""A link: one connection to one peer, which many threads write and one thread reads at a time.

Writing. A thread with a message writes it to the socket itself. While one thread is writing, other
threads queue their messages, and the writer takes them along. When the socket is full, the rest is
left to the reactor, which calls ``flush`` when there is room.

Reading. The thread that has claimed the link receives, and appends whole frames to ``incoming``.

``native/link.c`` writes and reads in steps that no signal handler interrupts. A frame that exceeds
its receive buffer is left to the parser in Python. ``PlainStream`` is its plain twin, and writes
connections with TLS as well. Between two processes of one host, a ring in shared memory may carry
the data: see ``torchweft.engine.io.ring``.

The socket itself blocks; ``MSG_DONTWAIT`` makes a single call non-blocking, and a receive
timeout lets a blocked reader look at the clock now and then.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NoReturn, Protocol

from torchweft import knobs
from torchweft.engine.io.ring import Ring
from torchweft.engine.threads import interrupts
from torchweft.engine.wire.frames import HEADER_BYTES, Buffer, Frame, FrameParser, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.wire.session import Outgoing
from torchweft.free_threading import copy_of
from torchweft.native import native

READ_TICK_S = 0.1
SEND_PATIENCE_S = 0.5
_IOV_LIMIT = 512
_QUEUED_PIECES = 64
"""Pieces of messages that the main thread leaves to the reactor before it waits for it."""
_DONTWAIT = socket.MSG_DONTWAIT
_SOCKET_BUFFER_BYTES = 1 << 20
POLL_S = 0.001
_QUICK_LOOKS = 50


class LinkClosed(ConnectionError):
    """The peer has closed the connection, or it broke; ``str`` gives the cause."""


Serving = tuple[Any, ...]
"""What ``read`` of the native link takes: how calls that come alone are served."""


class Watcher(Protocol):
    """Is told of the messages of a link, while they are traced."""

    def sending(self, parts: Sequence[Buffer]) -> object:
        """Notes messages that are about to be written."""

    def sent(self, noted: Any) -> None:
        """Notes that the messages of ``sending``, which returned ``noted``, are written."""

    def received(self, frame: Frame) -> None:
        """Notes a frame that is about to be handled."""


class PlainStream:
    """Writes a connection: the plain twin of the native ``Link``, whose names it has.

    A signal handler may interrupt the main thread at any step, and a frame must not be torn. So
    the main thread queues its messages, in one step, and leaves the writing to the reactor.

    Args:
        connection: A connected socket, or an equivalent object.
        keeps: Whether written data is kept until it is acknowledged, for a session.

    Attributes:
        is_broken: Whether the connection of a session is about to be replaced.
    """

    def __init__(self, connection: socket.socket, keeps: bool) -> None:
        self.connection = connection
        self.bytes_sent = self.bytes_received = 0
        self.is_broken = False
        self._is_closed = False
        self._keeps = keeps
        self._kept = Outgoing()
        self._queue: deque[Buffer] = deque()
        self._unsent: deque[Buffer] = deque()
        self._writing = threading.Lock()
        self._reading = threading.Lock()

    @property
    def position(self) -> int:
        """How many bytes were ever queued in a session."""
        return self._kept.position + sum(map(len, copy_of(self._queue)))

    @property
    def queued(self) -> int:
        """How many pieces of messages wait to be written."""
        return len(self._queue) + len(self._unsent)

    @property
    def is_writing(self) -> bool:
        return self._writing.locked()

    @property
    def is_looking(self) -> bool:
        return self._reading.locked()

    def claim(self) -> bool:
        return self._reading.acquire(False)

    def unclaim(self) -> None:
        self._reading.release()

    def hold(self, parts: Sequence[Buffer]) -> int:
        self._queue.extend(parts)
        return len(self._queue)

    def write(self, parts: Sequence[Buffer]) -> bool:
        """Queues a message and writes the queue; returns False if the socket is full."""
        self._queue.extend(parts)
        if self._is_closed:
            raise BrokenPipeError("the connection is closed")
        if get_ident() == interrupts.main_id:
            return False
        while self._queue or self._unsent:
            if not self._writing.acquire(False):
                return True  # The writer looks at the queue once more after its release.
            try:
                if not self._write_queue():
                    return False
            finally:
                self._writing.release()
            if self.is_broken:
                return True
        return True

    def _write_queue(self) -> bool:
        while self._queue:
            part = self._queue.popleft()
            if len(part):
                self._unsent.append(part)
                if self._keeps:
                    self._kept.keep((part,))
        while self._unsent and not self.is_broken:
            if self._is_closed:
                raise BrokenPipeError("the connection is closed")
            parts = list(islice(self._unsent, _IOV_LIMIT))
            try:
                self._advance(self.connection.sendmsg(parts, (), _DONTWAIT))
            except BlockingIOError:
                return False
        return True

    def _advance(self, size: int) -> None:
        self.bytes_sent += size
        while size:
            part = self._unsent[0]
            if size < len(part):
                self._unsent[0] = memoryview(part)[size:]
                return
            size -= len(part)
            self._unsent.popleft()

    def acknowledge(self, position: int) -> None:
        self._kept.acknowledge(position)

    def resume(self, position: int) -> None:
        """Goes on with a session from a position that is kept."""
        with self._writing:
            self._unsent = deque(self._kept.since(position))
            self.is_broken = False

    def close(self) -> None:
        """Ends the writing; drops the data unless a thread still writes it."""
        self._is_closed = True
        if self._writing.acquire(False):
            self._queue.clear()
            self._unsent.clear()
            self._kept.clear()
            self._writing.release()


class Link:
    """One connection to a peer.

    Args:
        connection: A connected socket; the link owns it from here on.
        parser: Cuts received bytes into frames.
        when_full: Called, on any thread, when the socket is full: ``flush`` must be called as
            soon as it is writable.
        ring: Memory that carries the data instead of the connection, for a link in C.

    Attributes:
        native: The connection in C; None in the plain twin.
    """

    watcher: Watcher | None = None
    """Is told of the messages, while they are traced."""
    _keeps = False

    def __init__(
        self,
        connection: socket.socket,
        parser: FrameParser,
        when_full: Callable[[Link], None],
        ring: Ring | None = None,
    ) -> None:
        self.incoming: deque[Frame] = deque()
        """Frames that have been read, and not handled."""
        self.handling = threading.Lock()
        """Held by the thread that handles them, in order."""
        self._bytes_received = 0
        self.serving: Serving | None = None
        """How the native twin serves calls that come alone; None if it does not."""
        self.brought_tasks = False
        """Whether the last read for the reactor gave it tasks; for the reader's use."""
        self.parser = parser
        """Cuts received bytes into frames, for the thread that reads."""
        self._socket = connection
        is_plain = native is None or not isinstance(connection, socket.socket)
        # A TLS connection has no flag for that.
        self._all_flags = socket.MSG_WAITALL if isinstance(connection, socket.socket) else 0
        self._when_full = when_full
        self._is_closed = False
        tune(connection)
        self.read_fd = os.dup(connection.fileno()) if self._keeps else connection.fileno()
        self._write_socket = connection.dup()
        self.write_fd = self._write_socket.fileno()
        self.native: Any = None if is_plain else self._new_native(ring)
        self._has_ring = self.native is not None and ring is not None
        self.serves = self.native is not None and not self._keeps
        """Whether calls that come alone may be served while the link is read."""
        self.expects_usual = self.serves
        """Whether to look for such calls: not after another message, which takes longer so."""
        self._stream: Any = self.native or PlainStream(connection, self._keeps)
        self.claim: Callable[[], bool] = self._stream.claim
        """Takes the right to read, for a thread of the reactor; returns whether it was free."""
        self.unclaim: Callable[[], None] = self._stream.unclaim
        """Gives up the right to read."""

    def _new_native(self, ring: Ring | None) -> Any:
        assert native is not None
        # A frame that fits is within all limits; the parser in Python checks the others.
        receive_bytes = min(
            knobs.RECEIVE_BUFFER_BYTES.get(),
            knobs.CONTROL_LIMIT_BYTES.get(),
            knobs.FRAME_LIMIT_BYTES.get(),
        )
        add_frame = self.incoming.append
        return native.Link(
            self.read_fd,
            add_frame,
            self._keeps,
            max(receive_bytes, HEADER_BYTES),
            knobs.SPIN_S.get(),
            *(ring or ()),
        )

    @property
    def bytes_sent(self) -> int:
        """How many bytes were written."""
        return int(self._stream.bytes_sent)

    @property
    def bytes_received(self) -> int:
        """How many bytes were read."""
        return self._bytes_received + int(self._stream.bytes_received)

    @property
    def is_broken(self) -> bool:
        """Whether the connection is broken and may be replaced."""
        return False

    @property
    def is_free(self) -> bool:
        """Whether the link has ended and its descriptors are freed."""
        return self.read_fd < 0

    @property
    def has_queued(self) -> bool:
        """Whether anything waits to be written."""
        return bool(self._stream.queued) and not self.is_broken

    @property
    def arm(self) -> Callable[[], object] | None:
        """What has the reactor told of data; see ``Reactor.watch_reading``."""
        return None if self.native is None else self.native.arm

    # Writing

    def send(self, parts: list[Buffer], *, may_block: bool) -> None:
        """Writes ``parts`` in order, now or, if the socket is full, as soon as there is room.

        The memory of ``parts`` must not change until written.

        Args:
            parts: Byte buffers that make up whole frames.
            may_block: Whether this thread may wait for room. Reading threads must not.

        Raises:
            LinkClosed: The connection has ended.
        """
        if self._is_closed:
            raise LinkClosed("the connection is closed")
        watcher = self.watcher
        noted = None if watcher is None else watcher.sending(parts)
        self._send(parts, may_block)
        if watcher is not None:
            watcher.sent(noted)

    def _send(self, parts: Sequence[Buffer], may_block: bool) -> None:
        try:
            is_written = self._stream.write(parts) or (may_block and self._write_rest())
            if not is_written and not self._has_ring:  # The reader writes the rest to a ring.
                self._when_full(self)
        except OSError as error:
            self._cannot_write(error)

    def _write_rest(self) -> bool:
        """Waits for room and writes, but not for a peer that reads nothing for long.

        Returns whether all is written. What is not stays in the queue, also if a signal handler
        raises: then it is for the reactor.
        """
        if self.native is None and get_ident() == interrupts.main_id:
            self._when_full(self)
            self._wait_for_flush()
            return True
        room = select.poll()
        room.register(self.write_fd, select.POLLOUT)
        is_written = False
        try:
            if self._has_ring:
                return self._write_rest_to_ring()
            while not is_written and room.poll(SEND_PATIENCE_S * 1e3):
                is_written = self._stream.write(())
        except BaseException:
            self._when_full(self)
            raise
        return is_written

    def _write_rest_to_ring(self) -> bool:
        """Writes as room comes: its bell is for the thread that reads."""
        end, sent, limit_s, looks = int(self._stream.position), -1, 0.0, 0
        # ``write`` is true as well while another thread, such as the reader, writes the rest.
        while not self._stream.write(()) or self.bytes_sent < end:
            if self.bytes_sent != sent:
                sent, limit_s, looks = self.bytes_sent, time.monotonic() + SEND_PATIENCE_S, 0
            elif time.monotonic() > limit_s:
                return False
            looks += 1  # A peer that reads has made room before this thread could sleep and wake.
            time.sleep(POLL_S if looks > _QUICK_LOOKS else 0.0)
        return True

    def _cannot_write(self, error: OSError) -> None:
        self._is_closed = True
        raise LinkClosed(str(error)) from error

    def _wait_for_flush(self) -> None:
        """Waits while the reactor has much to write for the main thread, not for long."""
        limit_s = time.monotonic() + SEND_PATIENCE_S
        while (
            self._stream.queued > _QUEUED_PIECES
            and not self._is_closed
            and time.monotonic() < limit_s
        ):
            time.sleep(POLL_S)

    def hold(self, parts: list[Buffer]) -> int:
        """Queues frames until the next ``send`` or ``flush``; returns the queue's length.

        Args:
            parts: Whole frames.

        Raises:
            LinkClosed: The connection has ended.
        """
        if self._is_closed:
            raise LinkClosed("the connection is closed")
        watcher = self.watcher
        if watcher is not None:
            watcher.sent(watcher.sending(parts))
        return int(self._stream.hold(parts))

    def flush(self) -> None:
        """Writes what is queued; never blocks.

        Raises:
            LinkClosed: The connection has ended.
        """
        if self._stream.queued:
            self._send((), may_block=False)

    def mend(self) -> None:
        """Has the reactor write what an interrupted thread has left in the queue."""
        if self.has_queued and not self._is_closed:
            self._when_full(self)

    # Reading

    def receive(
        self, may_block: bool, may_spin: bool = False, serving: Serving | None = None
    ) -> bool:
        """Receives what has arrived, and appends the complete frames to ``incoming``.

        The caller has claimed the link.

        Args:
            may_block: Whether to wait, for about ``READ_TICK_S`` at most, if nothing has arrived.
            may_spin: Whether to look again and again for a moment, where that pays.
            serving: Has the native twin serve calls that come alone; their functions run here.

        Returns:
            Whether the link is still claimed; another thread may read it otherwise.

        Raises:
            LinkClosed: The peer is gone; everything it sent before is in ``incoming``.
            ProtocolError: The peer sent invalid data.
        """
        connection = self.native
        if connection is None:
            self._receive_parsed(may_block)
            return True
        if connection.awaits_room:
            self.flush()
        if not connection.is_large:
            try:
                count = connection.read(may_spin, serving)
            except OSError as error:
                raise LinkClosed(str(error)) from error
            if count is False:
                return False
            if not connection.is_large:
                if count is None:
                    raise LinkClosed(
                        "the connection is closed" if self._is_closed else "end of file"
                    )
                return True
        self._receive_parsed(may_block)
        connection.is_large = not self.parser.is_idle
        return True

    def _receive_parsed(self, may_block: bool) -> None:
        flags: int = _DONTWAIT
        if may_block:
            flags = self._all_flags if self.parser.large is not None else 0
        size = self._receive_some(flags)
        while size:
            self.incoming.extend(self.parser.received(size))
            if self._has_ring and may_block and self.parser.large is not None:
                size = self._receive_some(flags)  # As a socket waits for the whole frame.
            else:
                # No event announces data that a secure connection has already received.
                pending = getattr(self._socket, "pending", 0)
                size = self._receive_some(_DONTWAIT) if pending else 0

    def _receive_some(self, flags: int) -> int:
        """Receives into the parser's space; returns the number of bytes, 0 if none arrived yet."""
        space = self.parser.space()
        may_block = flags != _DONTWAIT
        counts = True
        try:
            if self._has_ring or (self.native is not None and self.parser.is_idle):
                size = int(self.native.fill(space[0], may_block))
                counts = False  # The connection in C has counted these bytes.
            elif len(space) == 1:
                size = self._socket.recv_into(space[0], 0, flags)
            else:
                size = self._socket.recvmsg_into(space[:_IOV_LIMIT], 0, flags)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if not size:
            raise LinkClosed("end of file")
        if counts:
            self._bytes_received += size
        return size

    # The end

    def say_goodbye(self, reason: bytes = b"") -> None:
        """Tells the peer why this side leaves, if there is a reason."""
        if reason:
            with contextlib.suppress(LinkClosed):  # The connection has ended, maybe just now.
                self.send(encode_frame(Kind.GOODBYE, 0, 0, reason), may_block=False)

    def drain(self, timeout_s: float) -> None:
        """Waits, for a limited time, until everything given to ``send`` has been written."""
        deadline_s = time.monotonic() + timeout_s
        while not self._is_closed and time.monotonic() < deadline_s:
            if not (self._stream.is_writing or self._stream.queued):
                return
            time.sleep(POLL_S)

    def hang_up(self) -> None:
        """Ends the connection; readers notice at once. Safe from any thread."""
        self._is_closed = True
        self._stream.close()
        shut(self._socket)

    def abandon(self) -> None:
        """Frees the descriptors in a forked process; its parent keeps the connection."""
        self._stream.close()
        self._socket.close()
        self._write_socket.close()
        if self._keeps:
            os.close(self.read_fd)

    def free(self) -> bool:
        """Frees descriptors and memory of a link that was hung up, once no thread uses them.

        Blocks for a moment. Returns False if a thread still reads or writes.
        """
        limit_s = time.monotonic() + SEND_PATIENCE_S
        while not (self._wait_for_writer() and self.claim()):
            if time.monotonic() > limit_s:
                return self.is_free
            time.sleep(POLL_S)
        try:
            if not self.is_free:
                self._release()
        finally:
            self.unclaim()
        return True

    def _wait_for_writer(self) -> bool:
        """Waits for a writer, for ``SEND_PATIENCE_S`` at most; returns whether there is none."""
        limit_s = time.monotonic() + SEND_PATIENCE_S
        while self._stream.is_writing:
            if time.monotonic() > limit_s:
                return False
            time.sleep(POLL_S)
        return True

    def close(self) -> None:
        """Frees the descriptors. Only when no thread reads or writes any more."""
        self.hang_up()
        self._wait_for_writer()
        self._release()

    def _release(self) -> None:
        # A late thread must not arm a descriptor that belongs to another file by then.
        read_fd, self.read_fd, self.write_fd = self.read_fd, -1, -1
        self._socket.close()
        self._write_socket.close()
        if self._keeps and read_fd >= 0:
            os.close(read_fd)
        self._stream.close()
        self.parser = FrameParser(_no_memory, 1, 0, 0)


def _no_memory(size_bytes: int) -> NoReturn:
    raise LinkClosed("the connection is closed")


def shut(connection: socket.socket) -> None:
    """Ends a connection in both directions, for other threads as well; it stays to be closed."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # The peer ended it first.


def tune(connection: socket.socket) -> None:
    """Sets the socket options that a link needs."""
    connection.setblocking(True)
    tick = struct.pack("ll", 0, int(READ_TICK_S * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
