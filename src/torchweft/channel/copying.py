"""Copies large memory, also another process's, together with a helper thread if a core is free.

``process_vm_readv`` copies between two address spaces in one system call, and ctypes lets other
Python threads run meanwhile. Its cost is pinning the source's pages, about 0.2 us each, more than
copying them. Pinning gains from a second thread if a core is free (16 MiB: 13 GB/s with one thread,
20 with two).

The helper serves both kinds of copies: out of another process's memory, and into memory shared with
it. The two threads take pieces in turn, so that neither waits long for a thread without a
processor. The helper is kept off its caller's core: the scheduler tends to wake a thread on its
waker's core, where the two would only alternate.

If no core is free the helper does harm: it holds a piece while it waits for a processor. So the
caller looks for a free core after it has copied the first piece alone. By then the thread that just
answered it, and spins for a moment for the next message, has gone to sleep.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
from collections.abc import Callable

import numpy as np

from torchweft import knobs
from torchweft.free_threading import shared_count
from torchweft.probe import running_threads, usable_cores

PIECE_BYTES = 2 << 20

Step = Callable[[int, int], None]
"""Copies one piece, given its offset and size, without holding the interpreter lock."""


_REASONS = {
    errno.EPERM: "the kernel does not permit it (see ptrace(2), access mode)",
    errno.ESRCH: "no such process",
    errno.EFAULT: "nothing is mapped there",
    errno.ENOSYS: "the kernel, or a filter, has no such call",
}


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
unavailable = "" if hasattr(_libc, "process_vm_readv") else "this system has no process_vm_readv"
"""Why this process cannot pull from any other; empty if it can."""

if not unavailable:
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
    _libc.process_vm_readv.argtypes = (
        ctypes.c_int,
        ctypes.POINTER(_Range),
        ctypes.c_ulong,
        ctypes.POINTER(_Range),
        ctypes.c_ulong,
        ctypes.c_ulong,
    )


def address_of(buffer: memoryview) -> int:
    """Returns the start address of contiguous, non-empty memory."""
    if buffer.readonly:
        # numpy takes 1.1 us. ctypes takes 0.2 us but requires writable memory.
        return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def pull(pid: int, address: int, into: memoryview) -> None:
    """Copies from another process's memory, blocking, without holding the interpreter lock.

    Args:
        pid: The process to read from.
        address: Start address in its memory.
        into: Writable, contiguous memory here; filled completely.

    Raises:
        OSError: Some bytes could not be read; the contents of ``into`` are undefined.
    """
    if into.nbytes:
        pull_range(pid, address, address_of(into), into.nbytes)


def pull_range(pid: int, source: int, target: int, size_bytes: int) -> None:
    """Does the same as ``pull`` with addresses, which must be valid."""
    if unavailable:
        raise _error(errno.ENOSYS, pid, source, size_bytes)
    # One call moves at most 2 GiB, and less where it meets a page that it cannot read.
    while size_bytes:
        here, there = _Range(target, size_bytes), _Range(source, size_bytes)
        count = _libc.process_vm_readv(pid, here, 1, there, 1, 0)
        if count <= 0:
            raise _error(ctypes.get_errno() if count else errno.EFAULT, pid, source, size_bytes)
        source, target, size_bytes = source + count, target + count, size_bytes - count


def _error(code: int, pid: int, address: int, size_bytes: int) -> OSError:
    reason = _REASONS.get(code, os.strerror(code))
    text = f"cannot read {size_bytes} bytes at {address:#x} of process {pid}: {reason}"
    return OSError(code, text)


class _Job:
    """A large copy from its second piece on; its threads take the pieces in turn."""

    def __init__(self, size_bytes: int, step: Step) -> None:
        self._size_bytes = size_bytes
        # The step keeps the memory: a helper must never write to memory that an interrupted caller
        # released.
        self._step = step
        self._offsets = shared_count(PIECE_BYTES, PIECE_BYTES)
        self._helper_slot = threading.Lock()
        self._helper_done = threading.Event()
        self._helper_error: OSError | None = None

    def run(self) -> None:
        for offset in self._offsets:
            missing = self._size_bytes - offset
            if missing <= 0:
                return
            self._step(offset, min(PIECE_BYTES, missing))

    def help(self) -> None:
        """Takes pieces in the helper thread, unless the job has already ended."""
        if not self._helper_slot.acquire(blocking=False):
            return
        try:
            self.run()
        except OSError as error:
            self._helper_error = error
        finally:
            self._helper_done.set()

    def finish(self) -> None:
        """Waits for a helper that has begun; a helper that has not will skip the job."""
        if not self._helper_slot.acquire(blocking=False):
            self._helper_done.wait()
        if self._helper_error is not None:
            raise self._helper_error


class Copier:
    """Copies for one worker, large ranges together with a helper thread.

    The thread starts with the first large copy; ``close`` ends it. Thread-safe.

    Args:
        name: Name of the helper thread.
    """

    def __init__(self, name: str = "weft-copy") -> None:
        self._name = name
        self._shared_pull_bytes = knobs.SHARED_PULL_BYTES.get()
        self._shared_copy_bytes = knobs.SHARED_COPY_BYTES.get()
        self._cores = usable_cores()
        self._may_share = len(self._cores) > 1
        self._avoided_core = -1
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._helper: threading.Thread | None = None

    def pull(self, pid: int, address: int, into: memoryview) -> None:
        """Copies from another process's memory; see ``pull``.

        Raises:
            OSError: Some bytes could not be read; the contents of ``into`` are undefined.
        """
        target = address_of(into)

        def step(offset: int, size_bytes: int, keep: memoryview = into) -> None:
            pull_range(pid, address + offset, target + offset, size_bytes)

        self._move(into.nbytes, self._shared_pull_bytes, step)

    def copy(self, source: int, target: int, size_bytes: int, keep: object) -> None:
        """Copies memory from one address to another.

        Args:
            source: The start of the source.
            target: The start of the target.
            size_bytes: How much to copy.
            keep: Keeps both memories meanwhile, also if this thread is interrupted.
        """

        def step(offset: int, piece_bytes: int, keep: object = keep) -> None:
            ctypes.memmove(target + offset, source + offset, piece_bytes)

        self._move(size_bytes, self._shared_copy_bytes, step)

    def close(self) -> None:
        """Ends the helper thread and waits for it; later copies run without it."""
        with self._lock:
            self._may_share = False
            helper, self._helper = self._helper, None
        if helper is not None:
            self._jobs.put(None)
            helper.join()

    def _move(self, size_bytes: int, shared_from_bytes: int, step: Step) -> None:
        if size_bytes < max(shared_from_bytes, PIECE_BYTES) or not self._may_share:
            step(0, size_bytes)
            return
        step(0, PIECE_BYTES)
        if not core_is_free():
            step(PIECE_BYTES, size_bytes - PIECE_BYTES)
            return
        self._ready_helper()
        job = _Job(size_bytes, step)
        self._jobs.put(job)
        try:
            job.run()
        finally:
            job.finish()

    def _ready_helper(self) -> None:
        """Starts the helper if there is none, and keeps it off the core that this thread is on."""
        core = _current_core()
        with self._lock:
            if not self._may_share:
                return
            if self._helper is None:
                helper = threading.Thread(target=self._help, name=self._name, daemon=True)
                try:
                    helper.start()
                except RuntimeError:
                    return  # The system cannot start a thread now: this one copies alone.
                self._helper = helper
            if core != self._avoided_core:
                self._avoided_core = core
                _restrict(self._helper, self._cores - {core})

    def _help(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.help()
            del job  # the job keeps the copied memory alive


def core_is_free() -> bool:
    """Whether fewer threads, this one included, want to run now than there are cores."""
    return 0 < running_threads() < (os.cpu_count() or 1)


def _current_core() -> int:
    """Returns the core that this thread is on, for now; -1 where the system does not say."""
    return int(_libc.sched_getcpu()) if hasattr(_libc, "sched_getcpu") else -1


def _restrict(thread: threading.Thread, cores: frozenset[int]) -> None:
    """Restricts a thread to some cores, if the system allows it."""
    if thread.native_id is None or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(thread.native_id, cores)
    except OSError:
        pass  # no such core, or not permitted: the helper is less useful then, but correct
