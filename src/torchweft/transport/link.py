"""A link: one connection to one peer, which many threads write and one thread reads at a time.

Writing. A thread with a message writes it to the socket itself; there is no writer thread between
a caller and the kernel. While one thread is writing, other threads queue their messages. A thread
that reads for others must never block in a write (two such threads, each waiting for the other
side to read, would deadlock); when the socket is full it leaves the rest to the reactor, which
calls ``flush`` when there is room. A thread that only writes may block.

Reading. The reader in ``readers`` receives and parses. It is a thread of the reactor, or a caller
that waits for an answer and reads it straight from the socket.

The main thread may be interrupted at any step (see ``torchweft.runtime.interrupts``). It writes
one message and, with ``receive_own``, reads its own answers. All else it leaves to other threads.
It holds no lock meanwhile: the signal handler that interrupts it may itself write, read and wait. A
thread that is about to write keeps the main thread from beginning (``_may_begin``).

The socket itself blocks; ``MSG_DONTWAIT`` makes a single call non-blocking, and a receive
timeout lets a blocked reader look at the clock now and then.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Sequence
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
    """The peer has closed the connection, or it broke; ``str`` gives the cause."""


class Link:
    """One connection to a peer.

    Args:
        connection: A connected socket; the link owns it from here on.
        parser: Cuts received bytes into frames.
        when_full: Called, on any thread, when the socket is full: ``flush`` must be called as
            soon as it is writable.
    """

    def __init__(
        self, connection: socket.socket, parser: FrameParser, when_full: Callable[[Link], None]
    ) -> None:
        self.readers: dict[int, object] = {}
        """The reader, under 0: ``readers.setdefault(0, me) is me`` claims, ``pop`` releases."""
        self.taken_by: object = None
        """The reader in the main thread, from its start until other threads may read again."""
        self.pending: list[int] = []
        """Sizes of what ``receive_own`` has received and no thread has parsed."""
        self.answer_spinning = Spinning()
        self.request_spinning = Spinning()
        self.brought_tasks = False
        """Whether the last read for the reactor gave it tasks; for the reactor's use."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.parser = parser
        """Cuts received bytes into frames, for the thread that reads."""
        self._socket = connection
        # A TLS connection has no flag for that.
        self._all_flags = socket.MSG_WAITALL if isinstance(connection, socket.socket) else 0
        self._when_full = when_full
        self._queue: deque[Buffer] = deque()
        # The main thread's write in progress: the parts, then the size that each write took.
        self._begun: list[Any] | None = None
        # The flags of that write, while the main thread may begin it.
        self._may_begin: list[int] | None = None
        self._writing = threading.Lock()
        # Not empty while ``_writing`` is left to ``flush``.
        self._full: list[None] = []
        self._is_closed = False
        tune(connection)
        self.read_fd = connection.fileno()
        # On which the main thread waits, unless it does so now.
        self._waiting: select.poll | None = None
        self._write_socket = connection.dup()
        self.write_fd = self._write_socket.fileno()

    may_be_interrupted = True
    """Whether ``receive_own`` works."""

    set_aside: Sequence[Frame] = ()
    """Frames that the last ``receive_own`` did not return, since the link handles them itself."""

    @property
    def is_broken(self) -> bool:
        """Whether the connection is broken and may be replaced."""
        return False

    @property
    def is_free(self) -> bool:
        """Whether the link has ended and its descriptors are freed."""
        return self.read_fd < 0

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
        if get_ident() == interrupts.main_id:
            self._send_in_main(parts, may_block)
            return
        if not self._writing.acquire(False):
            # The writer checks the queue when done; if it did so just before, write it here.
            self._queue.extend(parts)
            if self._writing.acquire(False):
                self._write([], may_block=False)
            return
        if len(parts) == 1 and not self._queue and self._begun is self._may_begin is None:
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
            # Goes before what others have queued meanwhile: it is the rest of a frame.
            self._write([memoryview(part)[size:]], may_block, is_rest=True)
            return
        self._write(parts, may_block)

    def _send_in_main(self, parts: list[Buffer], may_block: bool) -> None:
        """Writes at most one message in the main thread; the reactor flushes the rest."""
        self._begin(parts)
        if self._queue or self._begun is not None:
            self._when_full(self)
            if may_block:
                self._wait_for_flush()

    def _begin(self, parts: list[Buffer]) -> None:
        # Another thread that is about to write empties it: then this one writes nothing. Nor does
        # a write that this signal handler has interrupted.
        interrupted = self._may_begin
        if interrupted is not None:
            interrupted.clear()
        now = self._may_begin = [_DONTWAIT]
        is_behind = self._writing.locked() or self._queue or self._begun is not None
        if is_behind or len(parts) > _IOV_LIMIT:
            self._queue.extend(parts)
            self._may_begin = None
            return
        begun: list[Any] = [parts]
        self._begun = begun
        try:
            if len(parts) == 1:
                begun += map(self._socket.send, parts, now)
            else:
                begun += map(self._socket.sendmsg, (parts,), ((),), now)
        except OSError:
            pass  # Full, or broken: ``flush`` finds out which.
        is_whole = len(begun) > 1 and begun[1] == sum(map(len, parts))
        if is_whole and self._begun is begun:
            self._begun = None
            self.bytes_sent += begun[1]
        self._may_begin = None

    def _is_main_writing(self) -> bool:
        """Whether the main thread is just writing. The caller holds ``_writing``.

        If not, it will write nothing before the caller releases ``_writing``.
        """
        now = self._may_begin  # Read once: the main thread may end its write at any moment.
        if now is not None:
            now.clear()
        return interrupts.frame_of_main().f_code is type(self)._begin.__code__

    def _wait_for_main(self) -> None:
        """Waits for the moment in which the main thread writes. The caller holds ``_writing``."""
        while self._is_main_writing():
            time.sleep(_DRAIN_POLL_S)

    def _take_begun(self) -> None:
        """Moves the rest of the main thread's write in progress to the front of the queue."""
        begun = self._begun  # Read once: a write that a signal handler interrupts may end now.
        if begun is not None:
            parts, *sizes = begun
            self._queue.extendleft(reversed(advance(parts, sum(sizes))))
            self.bytes_sent += sum(sizes)
            self._begun = None

    def _wait_for_flush(self) -> None:
        """Waits while the reactor flushes, for ``SEND_PATIENCE_S`` at most."""
        limit_s = time.monotonic() + SEND_PATIENCE_S
        while (self._queue or self._begun is not None) and not self._is_closed:
            if time.monotonic() > limit_s:
                return
            time.sleep(_DRAIN_POLL_S)

    def wake_writer(self) -> None:
        """Has the reactor write what an interrupted thread has left; safe from any thread."""
        if (self._queue or self._begun is not None) and not self._writing.locked():
            self._when_full(self)

    def hold(self, parts: list[Buffer]) -> int:
        """Queues frames until the next ``send`` or ``write_held``; returns the queue's length.

        Args:
            parts: Whole frames.

        Raises:
            LinkClosed: The connection has ended.
        """
        if self._is_closed:
            raise LinkClosed("the connection is closed")
        self._queue.extend(parts)
        return len(self._queue)

    def write_held(self) -> None:
        """Writes the held frames; never blocks.

        Raises:
            LinkClosed: The connection has ended.
        """
        if (self._queue or self._begun is not None) and self._writing.acquire(False):
            self._write([], may_block=False)

    def flush(self) -> None:
        """Continues to write after ``when_full``; never blocks. Called by the reactor."""
        # The end of the connection is an event too; then ``_writing`` may not have been left held.
        try:
            self._full.pop()  # In one step: only one thread goes on with the write.
        except IndexError:
            self.write_held()
        else:
            self._write([], may_block=False)

    def _write(self, parts: list[Buffer], may_block: bool, *, is_rest: bool = False) -> None:
        """Writes the queue and ``parts``. The caller holds ``_writing``.

        Releases it when all is written, or leaves it to ``flush`` if the socket is full.

        Args:
            parts: This thread's buffers; written last.
            may_block: Whether this thread may wait for room for ``parts``.
            is_rest: Whether ``parts`` is the rest of a write in progress, to be written first.
        """
        queue = self._queue
        # Nobody writes before the rest of a frame: the main thread, too, found ``_writing`` held.
        if not is_rest and self._may_begin is not None and self._is_main_writing():
            queue.extend(parts)
            self._writing.release()
            self._when_full(self)
            return
        self._take_begun()
        if queue and not is_rest:
            # One thread's messages must not overtake each other.
            queue.extend(parts)
            parts = []
        try:
            while True:
                if not parts:
                    parts = [queue.popleft() for _ in range(min(len(queue), _BATCH))]
                    # Do not block this thread for what others queued.
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
            self._writing.release()
            raise LinkClosed(str(error)) from error
        self._full.append(None)
        self._when_full(self)

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
            self.bytes_sent += size
            parts = advance(parts, size)
            if may_block:
                limit_s = time.monotonic() + SEND_PATIENCE_S
        return parts

    def receive(self, *, may_block: bool) -> list[Frame]:
        """Receives what has arrived; returns the complete frames. The caller is in ``readers``.

        Args:
            may_block: Whether to wait, for about ``READ_TICK_S`` at most, if nothing has arrived.

        Raises:
            LinkClosed: The peer is gone; everything it sent before has been returned.
            ProtocolError: The peer sent invalid data.
        """
        if self.pending:
            return self._parse_pending()
        flags: int = _DONTWAIT
        if may_block:
            flags = self._all_flags if self.parser.is_within_large else 0
        size = self._receive_some(flags)
        return self.parser.received(size) if size else []

    def receive_own(self, reader: list[int], *, may_block: bool) -> list[Frame] | None:
        """Receives frames in the main thread, the reader; ``end_own`` or ``receive`` must follow.

        Args:
            reader: Contains 0 while it may read. A signal handler may clear it, at any step.
            may_block: Whether to wait, for about ``READ_TICK_S`` at most, if nothing has arrived.

        Returns:
            The frames; empty if nothing arrived. None if only ``receive``, in another thread, can
            tell what arrived.
        """
        space, pending = self.parser.idle_space(), self.pending
        if space is None or pending:
            return None
        if may_block:
            # A signal handler may run in here and take the link, so this receives nothing.
            # An interrupted wait keeps its object: one cannot be waited for twice.
            waiting, self._waiting = self._waiting, None
            if waiting is None:
                waiting = select.poll()
                waiting.register(self.read_fd, select.POLLIN)
            waiting.poll(READ_TICK_S * 1e3)
            self._waiting = waiting
        try:
            pending.extend(map(self._socket.recv_into, (space,), reader, _NOW))
        except BlockingIOError:
            return []
        except OSError:
            return None
        frames = self.parser.whole_frames(pending[0]) if pending else None
        return frames if reader else None  # Otherwise another thread reads them.

    def end_own(self, frames: Sequence[Frame], reader: list[int], consumed: list[int]) -> None:
        """Notes that the frames of ``receive_own`` have been handled.

        Args:
            frames: These frames, for subclasses.
            reader: See ``receive_own``.
            consumed: Extended with the received size in the step that clears ``pending``; not if
                another thread reads the frames.
        """
        consumed.extend(map(self.pending.pop, reader))
        self.bytes_received += sum(consumed)

    def _parse_pending(self) -> list[Frame]:
        size = sum(self.pending)
        self.pending = []
        self.bytes_received += size
        return self.parser.received(size) if size else []

    def receive_spinning(self, spinning: Spinning) -> list[Frame]:
        """Like a non-blocking ``receive``, but polls the socket for a moment."""
        if self.pending:
            return self._parse_pending()
        look = spinning.begin()
        while not (size := self._receive_some(_DONTWAIT)):
            if not look.goes_on():
                return []
        spinning.succeeded()
        return self.parser.received(size)

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
        self.bytes_received += size
        return size

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
            if not self._writing.locked() and self._begun is None:
                return
            time.sleep(_DRAIN_POLL_S)

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
        me = object()
        limit_s = time.monotonic() + SEND_PATIENCE_S
        while self.readers.setdefault(0, me) is not me:
            if time.monotonic() > limit_s:
                return self.is_free
            time.sleep(_DRAIN_POLL_S)
        try:
            if self.is_free:
                return True
            # A full link leaves ``_writing`` to ``flush``, which is not called any more.
            if not self._writing.acquire(timeout=SEND_PATIENCE_S) and not self._full:
                return False
            self._full.clear()
            self._wait_for_main()
            self._release()
            self._writing.release()
        finally:
            self.readers.pop(0)
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
        self._begun = None
        self.pending = []
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
