"""A link: one connection to one peer, which many threads write and one thread reads at a time.

Writing. A thread with a message writes it to the socket itself. While one thread is writing, other
threads queue their messages, and the writer takes them along. When the socket is full, the rest is
left to the reactor, which calls ``flush`` when there is room.

Reading. The thread that has claimed the link receives, and appends whole frames to ``incoming``.

The main thread may be interrupted by a signal handler at any step, and a frame must not be torn. So
it queues its messages, in one step, and leaves the writing to the reactor.

The socket itself blocks; ``MSG_DONTWAIT`` makes a single call non-blocking, and a receive
timeout lets a blocked reader look at the clock now and then.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torchweft.threads import interrupts
from torchweft.wire.frames import Buffer, Frame, FrameParser, encode_frame
from torchweft.wire.messages import Kind

READ_TICK_S = 0.1
SEND_PATIENCE_S = 0.5
_IOV_LIMIT = 512
_BATCH = 256
_DONTWAIT = socket.MSG_DONTWAIT
_SOCKET_BUFFER_BYTES = 1 << 20
POLL_S = 0.001


class LinkClosed(ConnectionError):
    """The peer has closed the connection, or it broke; ``str`` gives the cause."""


class Watcher(Protocol):
    """Is told of the messages of a link, while they are traced."""

    def sending(self, parts: Sequence[Buffer]) -> object:
        """Notes messages that are about to be written."""

    def sent(self, noted: Any) -> None:
        """Notes that the messages of ``sending``, which returned ``noted``, are written."""

    def received(self, frame: Frame) -> None:
        """Notes a frame that is about to be handled."""


class Link:
    """One connection to a peer.

    Args:
        connection: A connected socket; the link owns it from here on.
        parser: Cuts received bytes into frames.
        when_full: Called, on any thread, when the socket is full: ``flush`` must be called as
            soon as it is writable.
    """

    may_spin = False
    """Whether a thread that has read a request looks for the next one for a moment."""
    watcher: Watcher | None = None
    """Is told of the messages, while they are traced."""

    def __init__(
        self, connection: socket.socket, parser: FrameParser, when_full: Callable[[Link], None]
    ) -> None:
        self.incoming: deque[Frame] = deque()
        """Frames that have been read, and not handled."""
        self.handling = threading.Lock()
        """Held by the thread that handles them, in order."""
        self._bytes_sent = 0
        self._bytes_received = 0
        self.brought_tasks = False
        """Whether the last read for the reactor gave it tasks; for the reader's use."""
        self.parser = parser
        """Cuts received bytes into frames, for the thread that reads."""
        self._socket = connection
        # A TLS connection has no flag for that.
        self._all_flags = socket.MSG_WAITALL if isinstance(connection, socket.socket) else 0
        self._when_full = when_full
        self._queue: deque[Buffer] = deque()
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._is_closed = False
        tune(connection)
        self.read_fd = connection.fileno()
        self._write_socket = connection.dup()
        self.write_fd = self._write_socket.fileno()

    @property
    def bytes_sent(self) -> int:
        """How many bytes were written."""
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        """How many bytes were read."""
        return self._bytes_received

    @property
    def is_broken(self) -> bool:
        """Whether the connection is broken and may be replaced."""
        return False

    @property
    def is_free(self) -> bool:
        """Whether the link has ended and its descriptors are freed."""
        return self.read_fd < 0

    @property
    def is_receiving(self) -> bool:
        """Whether a thread just receives; what it has counted may not be in ``incoming`` yet."""
        return self._reading.locked()

    @property
    def has_queued(self) -> bool:
        """Whether anything waits to be written."""
        return bool(self._queue)

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

    def _send(self, parts: list[Buffer], may_block: bool) -> None:
        self._queue.extend(parts)
        if get_ident() == interrupts.main_id:
            self._when_full(self)
            if may_block:
                self._wait_for_flush()
        elif self._writing.acquire(False):
            self._write(may_block)

    def _wait_for_flush(self) -> None:
        """Waits while the reactor flushes, for ``SEND_PATIENCE_S`` at most."""
        limit_s = time.monotonic() + SEND_PATIENCE_S
        while self._queue and not self._is_closed and time.monotonic() < limit_s:
            time.sleep(POLL_S)

    def hold(self, parts: list[Buffer]) -> int:
        """Queues frames until the next ``send`` or ``write_held``; returns the queue's length.

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
        return self._hold(parts)

    def _hold(self, parts: list[Buffer]) -> int:
        self._queue.extend(parts)
        return len(self._queue)

    def write_held(self) -> None:
        """Writes the held frames; never blocks. Not in the main thread.

        Raises:
            LinkClosed: The connection has ended.
        """
        if self._queue and self._writing.acquire(False):
            self._write(may_block=False)

    def flush(self) -> None:
        """Continues to write after ``when_full``; never blocks. Called by the reactor."""
        self.write_held()

    def mend(self) -> None:
        """Has the reactor write what an interrupted thread has left in the queue."""
        if self.has_queued and not self._is_closed:
            self._when_full(self)

    def _write(self, may_block: bool) -> None:
        """Writes the queue. The caller holds ``_writing``, which is released here."""
        queue = self._queue
        while True:
            is_full = False
            try:
                while queue and not is_full:
                    parts = [queue.popleft() for _ in range(min(len(queue), _BATCH))]
                    rest = self._write_some(parts, may_block)
                    queue.extendleft(reversed(rest))
                    is_full = bool(rest)
                    may_block = False  # Do not block this thread for what others queued.
            except OSError as error:
                self._is_closed = True
                queue.clear()
                raise LinkClosed(str(error)) from error
            finally:
                self._writing.release()
            if is_full:
                self._when_full(self)
                return
            # A thread that queued something meanwhile has left it to this writer.
            if not queue or not self._writing.acquire(False):
                return

    def _write_some(self, parts: list[Buffer], may_block: bool) -> list[Buffer]:
        """Writes until done or the socket is full; returns what is left.

        With ``may_block``, waits for room, but not for a peer that reads nothing for long.
        """
        limit_s = time.monotonic() + SEND_PATIENCE_S if may_block else 0.0
        while parts:
            try:
                size = self._socket.sendmsg(parts[:_IOV_LIMIT], (), 0 if may_block else _DONTWAIT)
            except BlockingIOError:
                # Some kernels return before the send timeout is over.
                if not may_block or time.monotonic() > limit_s:
                    return parts
                continue
            self._bytes_sent += size
            parts = advance(parts, size)
            if may_block:
                limit_s = time.monotonic() + SEND_PATIENCE_S
        return parts

    # Reading

    def claim(self) -> bool:
        """Takes the right to read, for a thread of the reactor; returns whether it was free."""
        return self._reading.acquire(False)

    def unclaim(self) -> None:
        """Gives up the right to read."""
        self._reading.release()

    def receive(self, *, may_block: bool, may_spin: bool = False) -> None:
        """Receives what has arrived, and appends the complete frames to ``incoming``.

        The caller has claimed the link.

        Args:
            may_block: Whether to wait, for about ``READ_TICK_S`` at most, if nothing has arrived.
            may_spin: Whether to look again and again for a moment, where that pays.

        Raises:
            LinkClosed: The peer is gone; everything it sent before is in ``incoming``.
            ProtocolError: The peer sent invalid data.
        """
        flags: int = _DONTWAIT
        if may_block:
            flags = self._all_flags if self.parser.is_within_large else 0
        size = self._receive_some(flags)
        if size:
            self.incoming.extend(self.parser.received(size))

    def _receive_some(self, flags: int) -> int:
        """Receives into the parser's space; returns the number of bytes, 0 if none arrived yet."""
        space = self.parser.space()
        try:
            if len(space) == 1:
                size = self._socket.recv_into(space[0], 0, flags)
            else:
                size = self._socket.recvmsg_into(space[:_IOV_LIMIT], 0, flags)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if not size:
            raise LinkClosed("end of file")
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
        # The queue does not tell: a writer has removed from it what it is writing.
        while not self._is_closed and time.monotonic() < deadline_s:
            if not (self._writing.locked() or self._queue):
                return
            time.sleep(POLL_S)

    def hang_up(self) -> None:
        """Ends the connection; readers notice at once. Safe from any thread."""
        self._is_closed = True
        shut(self._socket)

    def abandon(self) -> None:
        """Frees the descriptors in a forked process; its parent keeps the connection."""
        self._socket.close()
        self._write_socket.close()

    def free(self) -> bool:
        """Frees descriptors and memory of a link that was hung up, once no thread uses them.

        Blocks for a moment. Returns False if a thread still reads or writes.
        """
        limit_s = time.monotonic() + SEND_PATIENCE_S
        while not self.claim():
            if time.monotonic() > limit_s:
                return self.is_free
            time.sleep(POLL_S)
        try:
            if self.is_free:
                return True
            if not self._writing.acquire(timeout=SEND_PATIENCE_S):
                return False
            self._release()
            self._writing.release()
        finally:
            self.unclaim()
        return True

    def close(self) -> None:
        """Frees the descriptors. Only when no thread reads or writes any more."""
        self.hang_up()
        self._release()

    def _release(self) -> None:
        # A late thread must not arm a descriptor that belongs to another file by then.
        self.read_fd = self.write_fd = -1
        self._socket.close()
        self._write_socket.close()
        self._queue.clear()
        self.parser = FrameParser(_no_memory, 1, 0, 0)


def _no_memory(size_bytes: int) -> memoryview:
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
    # A writer whose peer reads nothing for so long leaves the rest to ``flush``.
    patience = struct.pack("ll", 0, int(SEND_PATIENCE_S * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def advance(parts: list[Buffer], size: int) -> list[Buffer]:
    """Drops the first ``size`` bytes of ``parts``."""
    if size == sum(map(len, parts)):
        return []
    for index, part in enumerate(parts):
        length = len(part)
        if size < length:
            return [memoryview(part)[size:], *parts[index + 1 :]] if size else parts[index:]
        size -= length
    return []
