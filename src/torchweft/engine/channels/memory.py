"""Warm memory to receive into, copies between memories, and how much memory the system has left.

Writing to memory that the kernel has not backed with pages yet costs more than the copy itself (16
MiB: 5 ms to fault in 4 KiB pages, 0.5 ms in 2 MiB pages, 0.6 ms to copy). So slabs are faulted in
once and reused. A slab comes back when its last view dies. Users hold the views: tensors made by
``torch.frombuffer``, their views, slices of the memoryview.

Watching the memoryview that was handed out would be wrong. A slice does not keep it alive, so the
slab would come back while a tensor still uses it. But all views keep the object alive that
*exports* the memory. So every lease makes its own exporter, a numpy array of the right length, and
watches it.

Large memory is copied together with a helper thread if a core is free. The two threads take pieces
in turn, so that neither waits long for a thread without a processor.

If no core is free the helper does harm: it holds a piece while it waits for a processor. So the
caller looks for a free core after it has copied the first piece alone. By then the thread that just
answered it, and spins for a moment for the next message, has gone to sleep.

Memory of a container is charged to its limit as it is touched, and there is no error at the limit:
the kernel kills a process of the container. So the memory left is looked up beforehand.

Rules of the file:

- The callback of a weak reference runs in any thread at any point, even in the middle of ``lease``.
  So it is only the ``append`` of a deque.
- The lock is reentrant: a garbage collection under it may run a user's finalizer that calls
  ``lease``. Every step under the lock leaves the pool consistent.
- Memory is mapped, faulted in and unmapped outside the lock.
- A page lock that a slab has been given ends before the slab is unmapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import queue
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from torchweft import knobs
from torchweft.free_threading import shared_count
from torchweft.probe import running_threads, usable_cores

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20
STEPS_PER_DOUBLING = 4

_MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
_POPULATED_AT_ONCE_BYTES = 4 << 20
_POPULATED_LIMIT_BYTES = 64 << 20
"""Larger slabs get pages as they are written: a peer may announce data that it never sends."""


class Slab:
    """One mapping, faulted in.

    Attributes:
        attached: Objects that end before its memory does: its page lock, and its registrations.
    """

    __slots__ = ("__weakref__", "attached", "idle_since_s", "memory", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.attached: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()
        self.size_bytes = size_bytes
        self.idle_since_s = 0.0
        self.memory = _map(size_bytes)

    @property
    def address(self) -> int:
        """Where its memory begins."""
        return int(self.memory.ctypes.data)

    def __del__(self) -> None:
        # Before the memory goes. The pool drops slabs outside of its lock.
        self.attached.clear()


class _Watch(weakref.ref[Bytes]):
    """Watches one exporter, and knows the object behind its memory."""

    __slots__ = ("behind",)
    behind: Any


class Exporters(Generic[T]):
    """Exporters of memory, each with an object that comes back once no view is left.

    Thread-safe.

    Attributes:
        ended: The watches of exporters that have ended; only for a look whether there are any.
    """

    def __init__(self) -> None:
        self.ended: deque[Any] = deque()
        self._watches: dict[int, _Watch] = {}

    def add(self, exporter: Bytes, behind: T) -> None:
        """Watches an array, and all views of its memory."""
        watch = _Watch(exporter, self.ended.append)
        watch.behind = behind
        self._watches[id(watch)] = watch

    def take_ended(self) -> Iterator[T]:
        """Removes and yields the objects of exporters that have ended."""
        while self.ended:
            try:
                watch = self.ended.popleft()
            except IndexError:
                return  # Race: another thread took the last one.
            yield self._watches.pop(id(watch)).behind

    def all(self) -> list[T]:
        """Returns the objects that have not come back yet."""
        return [watch.behind for watch in list(self._watches.values())]


class IdleSlab(Protocol):
    """A slab as a pool keeps it."""

    size_bytes: int
    idle_since_s: float


S = TypeVar("S", bound=IdleSlab)


class IdleSlabs(Generic[S]):
    """The slabs that a pool may reuse, by their sizes. Under the lock of the pool.

    Attributes:
        size_bytes: The sum of their sizes.
    """

    def __init__(self) -> None:
        self._by_size: OrderedDict[int, list[S]] = OrderedDict()
        self.size_bytes = 0

    def add(self, slab: S) -> None:
        """Adds a slab that is idle from now on."""
        slab.idle_since_s = time.monotonic()
        self._by_size.setdefault(slab.size_bytes, []).append(slab)
        self.size_bytes += slab.size_bytes

    def take(self, size_bytes: int) -> S | None:
        """Takes the latest slab of a size; None if there is none."""
        slabs = self._by_size.setdefault(size_bytes, [])
        self._by_size.move_to_end(size_bytes)
        if not slabs:
            return None
        self.size_bytes -= size_bytes
        return slabs.pop()

    def take_older(self, idle_s: float) -> list[S]:
        """Takes the slabs that have been idle for ``idle_s`` seconds."""
        taken: list[S] = []
        limit_s = time.monotonic() - idle_s
        for slabs in list(self._by_size.values()):
            taken += [slab for slab in slabs if slab.idle_since_s <= limit_s]
            slabs[:] = [slab for slab in slabs if slab.idle_since_s > limit_s]
        self.size_bytes -= sum(slab.size_bytes for slab in taken)
        return taken

    def take_bytes(self, size_bytes: int) -> list[S]:
        """Takes slabs of at least so many bytes, if there are; least requested sizes first."""
        taken: list[S] = []
        for slabs in list(self._by_size.values()):
            while slabs and size_bytes > 0:
                taken.append(slabs.pop(0))
                size_bytes -= taken[-1].size_bytes
        self.size_bytes -= sum(slab.size_bytes for slab in taken)
        return taken


class Budget:
    """Counts bytes against a limit. Thread-safe.

    Args:
        limit_bytes: How many bytes may be reserved at a time.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._reserved_bytes = 0
        self._freed: deque[int] = deque()
        self._owners = Exporters[int]()
        self._lock = threading.RLock()

    @property
    def reserved_bytes(self) -> int:
        """The bytes that are reserved now."""
        with self._lock:
            self._reserved_bytes -= sum(self._owners.take_ended())
            while self._freed:
                self._reserved_bytes -= self._freed.popleft()
            return self._reserved_bytes

    def reserve(self, size_bytes: int) -> bool:
        """Counts bytes; returns False, and counts nothing, beyond the limit."""
        with self._lock:
            if self.reserved_bytes + size_bytes > self._limit_bytes:
                return False
            self._reserved_bytes += size_bytes
            return True

    def free(self, size_bytes: int) -> None:
        """Counts reserved bytes as free again."""
        self._freed.append(size_bytes)  # No lock: a finalizer may call this at any point.

    def free_with(self, owner: Bytes, size_bytes: int) -> None:
        """Counts reserved bytes as free again when an array, and all views of it, are gone."""
        self._owners.add(owner, size_bytes)


class BufferPool:
    """Leases warm memory and takes it back when its last view dies.

    Thread-safe. Memory that is still in use outlives the pool.

    Args:
        limit_bytes: How much idle memory to keep. Beyond it slabs are unmapped as they come back,
            the least recently requested sizes first.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()
        self._leases = Exporters[Slab]()
        self._idle = IdleSlabs[Slab]()
        self._by_address: weakref.WeakValueDictionary[int, Slab] = weakref.WeakValueDictionary()

    def lease(self, size_bytes: int) -> memoryview:
        """Returns writable memory of exactly ``size_bytes``, its start on a page boundary.

        Tensors, arrays and slices made of it keep it leased. The contents are undefined.

        Raises:
            MemoryError: The system has no memory left.
        """
        if not size_bytes:
            return memoryview(bytearray())
        slab_bytes = slab_size(size_bytes)
        slab = self._take(slab_bytes) or self._map(slab_bytes)
        exporter = slab.memory[:size_bytes]
        self._leases.add(exporter, slab)
        return exporter.data

    def slab_at(self, address: int) -> Slab | None:
        """Returns the slab that begins at an address, as every lease does; None for others."""
        with self._lock:
            return self._by_address.get(address)

    def keeps(self, slab: Slab) -> bool:
        """Whether a slab is small enough to be kept for reuse when it comes back."""
        return slab.size_bytes <= self._limit_bytes

    def trim(self, idle_s: float = 0.0) -> int:
        """Unmaps memory that was idle for ``idle_s`` seconds; returns the bytes unmapped."""
        with self._lock:
            unused = self._reclaim() + self._idle.take_older(idle_s)
        return sum(slab.size_bytes for slab in unused)

    def _take(self, slab_bytes: int) -> Slab | None:
        """Takes an idle slab of that size, if there is one."""
        unused: list[Slab] = []
        with self._lock:
            if self._leases.ended:
                unused += self._reclaim()
            return self._idle.take(slab_bytes)

    def _map(self, slab_bytes: int) -> Slab:
        slab = Slab(slab_bytes)
        with self._lock:
            self._by_address[slab.address] = slab
        return slab

    def _reclaim(self) -> list[Slab]:
        """Takes back ended leases.

        Returns slabs beyond the limit, for the caller to drop once it has left the lock.
        """
        unused: list[Slab] = []
        for slab in self._leases.take_ended():
            if self.keeps(slab):
                self._idle.add(slab)
            else:
                unused.append(slab)
        if self._idle.size_bytes > self._limit_bytes:
            unused += self._idle.take_bytes(self._idle.size_bytes - self._limit_bytes)
        return unused


@functools.lru_cache(1024)
def slab_size(size_bytes: int) -> int:
    """Rounds a size up to that of a slab: a few steps for every doubling, in whole pages.

    So sizes that differ a little, as batches do, share slabs. At most a quarter is lost, except
    where the step is a page or a huge page.
    """
    step = max((1 << (size_bytes - 1).bit_length()) // (2 * STEPS_PER_DOUBLING), PAGE_BYTES)
    if size_bytes > HUGE_PAGE_BYTES:
        step = max(step, HUGE_PAGE_BYTES)
    return -(-size_bytes // step) * step


def _map(size_bytes: int) -> Bytes:
    """Maps private memory, in huge pages if the kernel can.

    Memory up to ``_POPULATED_LIMIT_BYTES`` is faulted in at once, larger memory as it is used.
    """
    is_huge = size_bytes >= HUGE_PAGE_BYTES
    # A huge page starts at a multiple of its size. The slack mapped for that alignment is never
    # touched, so it costs only addresses.
    slack = HUGE_PAGE_BYTES if is_huge else 0
    try:
        mapping = mmap.mmap(-1, size_bytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for a buffer of {size_bytes} bytes: {error}") from error
    whole: Bytes = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES if is_huge else 0
    memory = whole[start : start + size_bytes]
    address = memory.ctypes.data
    if is_huge:
        advise_huge_pages(address, size_bytes)
    if size_bytes <= _POPULATED_LIMIT_BYTES and not _populate(address, size_bytes):
        memory[::PAGE_BYTES] = 0
    return memory


def _populate(address: int, size_bytes: int) -> bool:
    """Faults memory in; returns False if the kernel has no call for that.

    Works in pieces: during a call, other mappings in this process wait, and all page faults behind
    them. For a gigabyte no RPC would be served for seconds.
    """
    if sys.platform != "linux":
        return False
    for start in range(0, size_bytes, _POPULATED_AT_ONCE_BYTES):
        piece_bytes = min(_POPULATED_AT_ONCE_BYTES, size_bytes - start)
        code = madvise(address + start, piece_bytes, MADV_POPULATE_WRITE)
        if code == errno.ENOMEM:
            raise MemoryError(f"no memory for a buffer of {size_bytes} bytes: {os.strerror(code)}")
        if code:
            return False
    return True


def advise_huge_pages(address: int, size_bytes: int) -> None:
    """Asks the kernel for huge pages in a range of memory, before it is used; it may refuse."""
    start = -(-address // PAGE_BYTES) * PAGE_BYTES
    size_bytes -= start - address
    if sys.platform == "linux" and size_bytes >= HUGE_PAGE_BYTES:
        madvise(start, size_bytes, _MADV_HUGEPAGE)


# Not mmap.madvise, which holds the interpreter lock for the milliseconds that the call takes.
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def madvise(address: int, size_bytes: int, advice: int) -> int:
    """Advises the kernel on a range of memory; returns 0, or the error number."""
    return ctypes.get_errno() if _libc.madvise(address, size_bytes, advice) else 0


# Copies

PIECE_BYTES = 2 << 20


def address_of(buffer: memoryview) -> int:
    """Returns the start address of contiguous, non-empty memory."""
    if buffer.readonly:
        # numpy takes 1.1 us. ctypes takes 0.2 us but requires writable memory.
        return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class _Job:
    """A large copy from its second piece on; its threads take the pieces in turn.

    Args:
        source: The start of the source.
        target: The start of the target.
        size_bytes: How much to copy.
        keep: Keeps both memories: a helper must never write to memory that an interrupted caller
            released.
    """

    def __init__(self, source: int, target: int, size_bytes: int, keep: object) -> None:
        self._source, self._target, self._size_bytes = source, target, size_bytes
        self._keep = keep
        self._offsets = shared_count(PIECE_BYTES, PIECE_BYTES)
        self._helper_slot = threading.Lock()
        self._helper_done = threading.Event()

    def run(self) -> None:
        for offset in self._offsets:
            missing = self._size_bytes - offset
            if missing <= 0:
                return
            size_bytes = min(PIECE_BYTES, missing)
            ctypes.memmove(self._target + offset, self._source + offset, size_bytes)

    def help(self) -> None:
        """Takes pieces in the helper thread, unless the job has already ended."""
        if self._helper_slot.acquire(blocking=False):
            try:
                self.run()
            finally:
                self._helper_done.set()

    def finish(self) -> None:
        """Waits for a helper that has begun; a helper that has not will skip the job."""
        if not self._helper_slot.acquire(blocking=False):
            self._helper_done.wait()


class Copier:
    """Copies for one worker, large ranges together with a helper thread.

    The thread starts with the first large copy; ``close`` ends it. Thread-safe.

    Args:
        name: Name of the helper thread.
    """

    def __init__(self, name: str = "weft-copy") -> None:
        self._name = name
        self._shared_copy_bytes = max(knobs.SHARED_COPY_BYTES.get(), PIECE_BYTES)
        self._may_share = len(usable_cores()) > 1
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._helper: threading.Thread | None = None

    def copy(self, source: int, target: int, size_bytes: int, keep: object) -> None:
        """Copies memory from one address to another.

        Args:
            source: The start of the source.
            target: The start of the target.
            size_bytes: How much to copy.
            keep: Keeps both memories meanwhile, also if this thread is interrupted.
        """
        if size_bytes < self._shared_copy_bytes or not self._may_share:
            ctypes.memmove(target, source, size_bytes)
            return
        ctypes.memmove(target, source, PIECE_BYTES)
        job = _Job(source, target, size_bytes, keep)
        if core_is_free():
            self._ready_helper()
            self._jobs.put(job)
        try:
            job.run()
        finally:
            job.finish()

    def close(self) -> None:
        """Ends the helper thread and waits for it; later copies run without it."""
        with self._lock:
            self._may_share = False
            helper, self._helper = self._helper, None
        if helper is not None:
            self._jobs.put(None)
            helper.join()

    def _ready_helper(self) -> None:
        """Starts the helper if there is none."""
        with self._lock:
            if self._may_share and self._helper is None:
                helper = threading.Thread(target=self._help, name=self._name, daemon=True)
                # The system may have no room for a thread now: this one copies alone then.
                with contextlib.suppress(RuntimeError):
                    helper.start()
                    self._helper = helper

    def _help(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.help()
            del job  # the job keeps the copied memory alive


def core_is_free() -> bool:
    """Whether fewer threads, this one included, want to run now than there are cores."""
    return 0 < running_threads() < (os.cpu_count() or 1)


# How much memory is left

MEMINFO = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")

_NO_LIMIT = sys.maxsize


def available_bytes() -> int:
    """Returns how much memory is left, by the machine and by every limit that applies."""
    on_machine = _field(MEMINFO, "MemAvailable:")
    left = _NO_LIMIT if on_machine is None else on_machine << 10
    return min(left, *_within_limits(OWN_GROUPS, GROUPS), _NO_LIMIT)


def _within_limits(own_groups: Path, groups: Path) -> Iterator[int]:
    for line in _text(own_groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left(groups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _left(root, path, *names)


def _left(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """Yields the memory left in a control group and in each visible ancestor of it."""
    group = root / path.lstrip("/")
    for each in (group, *group.parents):
        limit_bytes = _number(each / limit)
        if limit_bytes is not None:
            used_bytes = _number(each / usage) or 0
            yield max(
                limit_bytes - used_bytes + (_field(each / "memory.stat", reclaimable) or 0), 0
            )
        if each == root:
            return


def _field(path: Path, name: str) -> int | None:
    """Returns the number behind a name that begins a line of a file."""
    for line in _text(path).splitlines():
        fields = line.split()
        if fields[:1] == [name]:
            return int(fields[1])
    return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None  # "max" means no limit


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
