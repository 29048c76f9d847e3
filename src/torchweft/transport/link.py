"""A link: one connection to one peer, which many threads write and one thread reads at a time.

Writing. Whoever has a message writes it to the socket itself; there is no writer thread between
a caller and the kernel. While one thread is writing, others put their messages in its queue. A
thread that reads for others must never block in a write (two such threads, each waiting for the
other side to read, would wait for ever); when the socket is full it leaves the rest to the
reactor, which calls ``flush`` when there is room. A thread that only writes may block.

Reading. Who is in ``readers`` receives and parses. That is a thread of the reactor, or a caller
that waits for an answer and reads it straight from the socket.

The main thread may be interrupted at any step (see ``torchweft.runtime.interrupts``). It writes
one message and, with ``receive_own``, reads answers that are its own. All else it leaves to others.

The socket itself blocks; ``MSG_DONTWAIT`` makes the single call non-blocking, and a receive
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
from collections.abc import Callable
from typing import Any

from torchweft.runtime import interrupts
from torchweft.transport.spinning import Spinning
from torchweft.wire.frames import Buffer, Frame, FrameParser, encode_frame
from torchweft.wire.messages import Kind

READ_TICK_S = 0.1
SEND_PATIENCE_S = 0.5
_IOV_LIMIT = 512
_BATCH = 256
_DONTWAIT = socket.MSG_DONTWAIT
_NOW = (_DONTWAIT,)
_SOCKET_BUFFER_BYTES = 1 << 20
_DRAIN_POLL_S = 0.001


class LinkClosed(ConnectionError):
    """The other side has closed the connection, or it broke; ``str`` says how."""


class Link:
    """One connection to a peer.

    Args:
        connection: A connected socket; the link owns it from here on.
        parser: Cuts what arrives into frames.
        when_full: Called, on any thread, when the socket is full and ``flush`` is to be called
            as soon as it is writable.
    """

    def __init__(
        self, connection: socket.socket, parser: FrameParser, when_full: Callable[[Link], None]
    ) -> None:
        self.readers: dict[int, object] = {}
        """Under 0, who reads: ``readers.setdefault(0, me) is me`` begins that, ``pop`` ends it."""
        self.taken_by: object = None
        """Who has begun to read in the main thread, until another thread may do so again."""
        self.pending: list[int] = []
        """What ``receive_own`` has received and nobody has parsed."""
        self.answer_spinning = Spinning()
        self.request_spinning = Spinning()
        self.brought_tasks = False
        """Whether what was last read for the reactor gave it tasks; for the reactor's use."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self._socket = connection
        self._parser = parser
        self._when_full = when_full
        self._queue: deque[Buffer] = deque()
        # What the main thread has begun to write: the parts, and how much of them each write took.
        self._begun: list[Any] | None = None
        self._writing = threading.Lock()
        self._is_full = False
        self._is_closed = False
        tune(connection)
        self.read_fd = connection.fileno()
        self._write_socket = connection.dup()
        self.write_fd = self._write_socket.fileno()

    may_be_interrupted = True
    """Whether ``receive_own`` works."""

    @property
    def is_broken(self) -> bool:
        """Whether there is no connection now, but may be one again."""
        return False

    @property
    def is_free(self) -> bool:
        """Whether it has ended, and has no descriptors any more."""
        return self.read_fd < 0

    def send(self, parts: list[Buffer], *, may_block: bool) -> None:
        """Writes ``parts`` in order, now or, where the socket is full, as soon as there is room.

        The memory of ``parts`` must stay as it is until written.

        Args:
            parts: Byte buffers that make up whole frames.
            may_block: Whether this thread may wait for room. Reading threads must not.

        Raises:
            LinkClosed: The connection is no more.
        """
        if self._is_closed:
            raise LinkClosed("the connection is closed")
        if get_ident() == interrupts.main_id:
            self._send_in_main(parts, may_block)
            return
        if not self._writing.acquire(False):
            # Whoever writes now looks at the queue when done; if that was just before, nobody does.
            self._queue.extend(parts)
            if self._writing.acquire(False):
                self._write([], may_block=False)
            return
        if len(parts) == 1 and not self._queue and self._begun is None:
            part = parts[0]
            try:
                size = self._socket.send(part, _DONTWAIT)
            except OSError:
                size = 0  # Full, or broken: ``_write`` finds out which.
            self.bytes_sent += size
            if size == len(part):
                self._writing.release()
                if self._queue and self._writing.acquire(False):
                    self._write([], may_block=False)
                return
            # Before what others have queued meanwhile: it is the rest of a frame.
            self._write([memoryview(part)[size:]], may_block, is_rest=True)
            return
        self._write(parts, may_block)

    def _send_in_main(self, parts: list[Buffer], may_block: bool) -> None:
        """Does what ``send`` does, one message at most; what is left, the reactor flushes."""
        if self._queue or len(parts) > _IOV_LIMIT or self._writing.locked():
            self._queue.extend(parts)
        else:
            with self._writing:
                if self._queue or self._begun is not None:
                    self._queue.extend(parts)
                else:
                    self._begun = begun = [parts]
                    self._begin(begun)
        if self._queue or self._begun is not None:
            self._when_full(self)
            if may_block:
                self._wait_for_flush()

    def _begin(self, begun: list[Any]) -> None:
        (parts,) = begun
        try:
            if len(parts) == 1:
                begun += map(self._socket.send, parts, _NOW)
            else:
                begun += map(self._socket.sendmsg, (parts,), ((),), _NOW)
        except OSError:
            return  # Full, or broken: ``flush`` finds out which.
        if begun[1] == sum(map(len, parts)):
            self._begun = None
            self.bytes_sent += begun[1]

    def _take_begun(self) -> None:
        """Puts what is left of a write that the main thread has begun before all else."""
        if self._begun is not None:
            parts, *sizes = self._begun
            self._queue.extendleft(reversed(advance(parts, sum(sizes))))
            self.bytes_sent += sum(sizes)
            self._begun = None

    def _wait_for_flush(self) -> None:
        """Waits while the reactor flushes, but not for a peer that reads nothing for long."""
        limit_s = time.monotonic() + SEND_PATIENCE_S
        while (self._queue or self._begun is not None) and not self._is_closed:
            if time.monotonic() > limit_s:
                return
            time.sleep(_DRAIN_POLL_S)

    def wake_writer(self) -> None:
        """Has the reactor write what a thread that was interrupted has left; any thread may ask."""
        if (self._queue or self._begun is not None) and not self._writing.locked():
            self._when_full(self)

    def hold(self, part: Buffer) -> int:
        """Keeps one frame until the next one is sent, or ``write_held``; returns how many wait.

        Raises:
            LinkClosed: The connection is no more.
        """
        if self._is_closed:
            raise LinkClosed("the connection is closed")
        self._queue.append(part)
        return len(self._queue)

    def write_held(self) -> None:
        """Writes what was held; never blocks.

        Raises:
            LinkClosed: The connection is no more.
        """
        if (self._queue or self._begun is not None) and self._writing.acquire(False):
            self._write([], may_block=False)

    def flush(self) -> None:
        """Writes on after ``when_full``; never blocks. Called by the reactor."""
        # The end of the connection is an event too, and then nobody may have been writing.
        if self._is_full:
            self._is_full = False
            self._write([], may_block=False)
        else:
            self.write_held()

    def _write(self, parts: list[Buffer], may_block: bool, *, is_rest: bool = False) -> None:
        """Writes what others have queued and ``parts``. This thread has ``_writing``.

        It gives that up when all is written, or leaves it to ``flush`` where the socket is full.

        Args:
            parts: What this thread has to write; comes last.
            may_block: Whether it may wait for room for that.
            is_rest: Whether ``parts`` is the rest of what it has begun to write: comes first.
        """
        queue = self._queue
        self._take_begun()
        if queue and not is_rest:
            # One thread's messages must not overtake each other.
            queue.extend(parts)
            parts = []
        try:
            while True:
                if not parts:
                    parts = [queue.popleft() for _ in range(min(len(queue), _BATCH))]
                    # What others queued is not worth blocking this thread for.
                    may_block = False
                if not parts:
                    self._writing.release()
                    if not queue or not self._writing.acquire(False):
                        return
                    continue
                parts = self._write_some(parts, may_block)
                if parts:
                    queue.extendleft(reversed(parts))
                    break
        except OSError as error:
            self._is_closed = True
            queue.clear()
            raise LinkClosed(str(error)) from error
        self._is_full = True
        self._when_full(self)

    def _write_some(self, parts: list[Buffer], may_block: bool) -> list[Buffer]:
        """Writes until done or the socket is full; returns what is left.

        Who may block waits for room, but not for a peer that reads nothing for long.
        """
        limit_s = time.monotonic() + SEND_PATIENCE_S if may_block else 0.0
        while parts:
            try:
                size = self._socket.sendmsg(parts[:_IOV_LIMIT], (), 0 if may_block else _DONTWAIT)
            except BlockingIOError:
                # Some kernels give up waiting before the time that they were given.
                if not may_block or time.monotonic() > limit_s:
                    return parts
                continue
            self.bytes_sent += size
            parts = advance(parts, size)
            if may_block:
                limit_s = time.monotonic() + SEND_PATIENCE_S
        return parts

    def receive(self, *, may_block: bool) -> list[Frame]:
        """Receives what is there and returns the frames that are complete. Needs ``reading``.

        Args:
            may_block: Whether to wait, for about ``READ_TICK_S`` at most, if nothing is there.

        Raises:
            LinkClosed: The other side is gone; everything it sent before has been returned.
            ProtocolError: What it sent makes no sense.
        """
        if self.pending:
            return self._parse_pending()
        size = self._receive_some(0 if may_block else _DONTWAIT)
        return self._parser.received(size) if size else []

    def receive_own(self, *, may_block: bool) -> list[Frame] | None:
        """Receives frames in the main thread, which reads; ``end_own`` follows, or ``receive``.

        Returns:
            The frames; none if nothing came. None where only ``receive`` can tell what came, in
            another thread.
        """
        space = self._parser.idle_space()
        if space is None or self.pending:
            return None
        try:
            if may_block:
                self.pending += map(self._socket.recv_into, (space,))
            else:
                self.pending += map(self._socket.recv_into, (space,), (0,), _NOW)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self._parser.whole_frames(self.pending[0])

    def end_own(self, consumed: list[int]) -> None:
        """Notes that the frames of ``receive_own`` have been dealt with.

        Args:
            consumed: Takes the sizes of what was received, in the step that ends it.
        """
        consumed += map(self.pending.pop, (0,) * len(self.pending))
        self.bytes_received += sum(consumed)

    def _parse_pending(self) -> list[Frame]:
        size = sum(self.pending)
        self.pending = []
        self.bytes_received += size
        return self._parser.received(size) if size else []

    def receive_spinning(self, spinning: Spinning) -> list[Frame]:
        """Like ``receive``, without blocking, but looks for what comes within a moment."""
        if self.pending:
            return self._parse_pending()
        look = spinning.begin()
        while not (size := self._receive_some(_DONTWAIT)):
            if not look.goes_on():
                return []
        spinning.succeeded()
        return self._parser.received(size)

    def _receive_some(self, flags: int) -> int:
        """Receives into the parser's space; returns how much, 0 if there is nothing yet."""
        space = self._parser.space()
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
        self.bytes_received += size
        return size

    def say_goodbye(self, reason: bytes = b"") -> None:
        """Tells the peer why this side leaves, where there is a reason to tell."""
        if reason:
            with contextlib.suppress(LinkClosed):  # It has ended, maybe just now.
                self.send(encode_frame(Kind.GOODBYE, 0, 0, reason), may_block=False)

    def drain(self, timeout_s: float) -> None:
        """Waits, for a limited time, until everything given to ``send`` has been written."""
        deadline_s = time.monotonic() + timeout_s
        # Not the queue: a writer has taken out of it what it is writing.
        while not self._is_closed and time.monotonic() < deadline_s:
            if not self._writing.locked() and self._begun is None:
                return
            time.sleep(_DRAIN_POLL_S)

    def hang_up(self) -> None:
        """Ends the connection; readers notice at once. Safe from any thread."""
        self._is_closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The other side was faster.

    def abandon(self) -> None:
        """Frees the descriptors, in a forked process, and leaves the connection to its parent."""
        self._socket.close()
        self._write_socket.close()

    def free(self) -> bool:
        """Frees descriptors and memory of a link that was hung up, once nobody uses them.

        Blocks for a moment. Returns False where somebody is still writing.
        """
        me = object()
        limit_s = time.monotonic() + SEND_PATIENCE_S
        while self.readers.setdefault(0, me) is not me:
            if time.monotonic() > limit_s:
                return self.is_free
            time.sleep(_DRAIN_POLL_S)
        try:
            if self.is_free:
                return True
            # A full link is left to ``flush``, which nobody calls any more.
            if not self._writing.acquire(timeout=SEND_PATIENCE_S) and not self._is_full:
                return False
            self._is_full = False
            self._release()
            self._writing.release()
        finally:
            self.readers.pop(0)
        return True

    def close(self) -> None:
        """Frees the descriptors. Only when nobody reads or writes any more."""
        self.hang_up()
        self._release()

    def _release(self) -> None:
        # Whoever comes late must not arm a stranger's descriptor.
        self.read_fd = self.write_fd = -1
        self._socket.close()
        self._write_socket.close()
        self._queue.clear()
        self._begun = None
        self.pending = []
        self._parser = FrameParser(_no_memory, 0, 0, 0)


def _no_memory(size_bytes: int) -> memoryview:
    raise LinkClosed("the connection is closed")


def tune(connection: socket.socket) -> None:
    """Sets what a link needs of its socket."""
    connection.setblocking(True)
    tick = struct.pack("ll", 0, int(READ_TICK_S * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
    # Who waits for room with a peer that reads nothing leaves the rest to ``flush``.
    patience = struct.pack("ll", 0, int(SEND_PATIENCE_S * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def advance(parts: list[Buffer], size: int) -> list[Buffer]:
    """Drops the first ``size`` bytes of ``parts``."""
    for index, part in enumerate(parts):
        length = len(part)
        if size < length:
            return [memoryview(part)[size:], *parts[index + 1 :]] if size else parts[index:]
        size -= length
    return []
