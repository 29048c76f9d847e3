"""Memory that is registered once, and used for one buffer after another.

Registering memory takes longer than reading it, and a peer can only read registered memory from its
start. So the sender copies each buffer to a *slab*, whose size is a power of two. The receiver
reads it into a slab of its own, which then is the memory of the tensor. The slab that was used last
is taken first, as it is the warmest. The memory comes from the warm pool, whose pages uploads to
GPUs lock.

A slab of the sender comes back when its ``Staged`` ends. That is when the peer has reported that it
has the buffer, or when the message is not sent. A slab of the receiver comes back when the last
view of its tensor ends. A slab whose transfer may still be running never comes back.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from torchweft import knobs
from torchweft.channel.copying import Copier
from torchweft.channel.rdma import Endpoint, Registration
from torchweft.channel.table import RDMA, BufferEntry, SharedHandle
from torchweft.free_threading import shared_count

Bytes = npt.NDArray[np.uint8]
Lease = Callable[[int], memoryview]


class Budget:
    """Counts the registered memory of a worker against a limit. Thread-safe.

    Args:
        limit_bytes: How much memory may be reserved.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()
        self.reserved_bytes = 0

    def reserve(self, size_bytes: int) -> bool:
        """Counts bytes; returns False, and counts nothing, beyond the limit."""
        with self._lock:
            if self.reserved_bytes + size_bytes > self._limit_bytes:
                return False
            self.reserved_bytes += size_bytes
            return True

    def free(self, size_bytes: int) -> None:
        """Counts reserved bytes as free again."""
        with self._lock:
            self.reserved_bytes -= size_bytes


class Slab:
    """Registered memory.

    Attributes:
        number: Its number at its endpoint.
        memory: Its memory.
        registration: The registration.
        size_bytes: Its size.
        description: The bytes with which the peer can read it; empty for a slab of a receiver.
        is_described: Whether the peer has the description for certain.
        is_counted: Whether it is within the budget.
        idle_since_s: When it came back.
    """

    __slots__ = (
        "description",
        "idle_since_s",
        "is_counted",
        "is_described",
        "memory",
        "number",
        "registration",
        "size_bytes",
    )

    def __init__(self, number: int, memory: memoryview, registration: Registration) -> None:
        self.number = number
        self.memory: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self.registration = registration
        self.size_bytes = memory.nbytes
        self.description = b""
        self.is_described = False
        self.is_counted = False
        self.idle_since_s = 0.0

    def handle(self) -> SharedHandle:
        """Returns the description as it goes along with a message."""
        return SharedHandle(self.number, self.size_bytes, self.description)


class Staged:
    """A copy of a buffer in a slab, kept until the peer has read it, or is lost.

    Attributes:
        entry: Its entry in the table of its message.
        nbytes: Its size.
    """

    __slots__ = ("_idle", "_slab", "entry", "nbytes")

    def __init__(self, slab: Slab, size_bytes: int, idle: deque[Slab]) -> None:
        self._slab = slab
        self._idle: deque[Slab] | None = idle
        self.entry = BufferEntry(RDMA, size_bytes, slab.number)
        self.nbytes = size_bytes

    @property
    def handles(self) -> tuple[SharedHandle, ...]:
        """The descriptions that the peer may not have."""
        return () if self._slab.is_described else (self._slab.handle(),)

    @property
    def memory(self) -> memoryview:
        """The copy."""
        return self._slab.memory[: self.nbytes].data

    def acknowledge(self) -> None:
        """Notes that the peer has the slab's description, since it has read the slab."""
        self._slab.is_described = True

    def abandon(self) -> None:
        """Keeps the slab from being used again: the peer may still be reading it."""
        self._idle = None

    def __del__(self) -> None:
        if self._idle is not None:
            self._idle.append(self._slab)


class _Slabs:
    """The slabs of one endpoint. Thread-safe.

    Args:
        endpoint: Registers them.
        lease: Leases memory of the warm pool.
        budget: The registered memory of the worker.
    """

    def __init__(self, endpoint: Endpoint, lease: Lease, budget: Budget) -> None:
        self._endpoint = endpoint
        self._lease = lease
        self._budget = budget
        self._smallest_bytes = knobs.RDMA_FROM_BYTES.get()
        self._numbers = shared_count(1)
        self._lock = threading.RLock()  # A garbage collection may run a finalizer of the user.
        self._idle: dict[int, list[Slab]] = {}
        self._counted_bytes = 0
        self._is_closed = False

    def size_for(self, size_bytes: int) -> int:
        """Returns the size of the slab for a buffer."""
        return 1 << (max(size_bytes, self._smallest_bytes, 1) - 1).bit_length()

    def close(self) -> None:
        """Forgets all slabs, which are not registered any more, or will not be."""
        with self._lock:
            self._is_closed = True
            counted_bytes, self._counted_bytes = self._counted_bytes, 0
            self._idle.clear()
        self._budget.free(counted_bytes)

    def _count(self, size_bytes: int) -> bool:
        """Reserves memory for a slab; returns False beyond the budget, and after ``close``."""
        with self._lock:
            if self._is_closed or not self._budget.reserve(size_bytes):
                return False
            self._counted_bytes += size_bytes
            return True

    def _discount(self, size_bytes: int) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._counted_bytes -= size_bytes
        self._budget.free(size_bytes)

    def _make(self, size_bytes: int) -> Slab:
        memory = self._lease(size_bytes)
        return Slab(next(self._numbers), memory, self._endpoint.register(memory))


class SendingSlabs(_Slabs):
    """The slabs that a peer reads. They stay registered as long as the endpoint is open."""

    def __init__(self, endpoint: Endpoint, lease: Lease, budget: Budget) -> None:
        super().__init__(endpoint, lease, budget)
        self._ended: deque[Slab] = deque()

    def put(self, buffer: memoryview, copier: Copier) -> Staged | None:
        """Copies a buffer to a slab; returns None if no memory is left for one.

        Raises:
            TransportFailed: No slab can be registered.
        """
        slab = self._take(self.size_for(buffer.nbytes))
        if slab is None:
            return None
        staged = Staged(slab, buffer.nbytes, self._ended)
        copier.copy(buffer, staged.memory)
        return staged

    def _take(self, slab_bytes: int) -> Slab | None:
        slab = self._pop(slab_bytes)
        if slab is None and self._count(slab_bytes):
            try:
                slab = self._make(slab_bytes)
                slab.description = self._endpoint.describe(slab.registration)
            except BaseException:
                self._discount(slab_bytes)
                raise
        elif slab is None:
            with self._lock:
                larger = sorted(size for size, idle in self._idle.items() if size > slab_bytes)
            for size_bytes in larger:
                slab = slab or self._pop(size_bytes)
        return slab

    def _pop(self, slab_bytes: int) -> Slab | None:
        with self._lock:
            while self._ended:
                slab = self._ended.popleft()
                self._idle.setdefault(slab.size_bytes, []).append(slab)
            idle = self._idle.get(slab_bytes)
            return idle.pop() if idle and not self._is_closed else None


class _View(weakref.ref[Bytes]):
    """Watches the memory of a received buffer, and knows its slab."""

    __slots__ = ("slab",)
    slab: Slab


class ReceivingSlabs(_Slabs):
    """The slabs that buffers of a peer are read into. The budget limits those that are idle."""

    def __init__(self, endpoint: Endpoint, lease: Lease, budget: Budget) -> None:
        super().__init__(endpoint, lease, budget)
        self._views: dict[int, _View] = {}
        self._ended: deque[Any] = deque()

    def take(self, size_bytes: int) -> Slab:
        """Returns a slab to read a buffer into.

        Raises:
            TransportFailed: No slab can be registered.
            MemoryError: The system has no memory left.
        """
        slab_bytes = self.size_for(size_bytes)
        self._settle()
        with self._lock:
            idle = self._idle.get(slab_bytes)
            if idle:
                return idle.pop()
        slab = self._make(slab_bytes)
        slab.is_counted = self._count(slab_bytes)
        return slab

    def lend(self, slab: Slab, size_bytes: int) -> memoryview:
        """Returns the start of a slab, which comes back when the last view of it has ended."""
        exporter = slab.memory[:size_bytes]
        # The callback may run in any thread at any point, so it is only the append of a deque.
        view = _View(exporter, self._ended.append)
        view.slab = slab
        self._views[id(view)] = view
        return exporter.data

    def give_back(self, slab: Slab) -> None:
        """Takes back a slab that no transfer uses; ends its registration beyond the budget."""
        slab.is_counted = slab.is_counted or self._count(slab.size_bytes)
        if not slab.is_counted:
            self._endpoint.unregister(slab.registration)
            return
        slab.idle_since_s = time.monotonic()
        with self._lock:
            if not self._is_closed:
                self._idle.setdefault(slab.size_bytes, []).append(slab)

    def trim(self, idle_s: float) -> None:
        """Ends the registrations of slabs that were idle for ``idle_s`` seconds."""
        self._settle()
        before_s = time.monotonic() - idle_s
        ended: list[Slab] = []
        with self._lock:
            for idle in self._idle.values():
                ended += [slab for slab in idle if slab.idle_since_s <= before_s]
                idle[:] = [slab for slab in idle if slab.idle_since_s > before_s]
        for slab in ended:
            self._discount(slab.size_bytes)
            self._endpoint.unregister(slab.registration)

    def _settle(self) -> None:
        while self._ended:
            try:
                view = self._ended.popleft()
            except IndexError:
                return  # Race: another thread took the last one.
            self.give_back(self._views.pop(id(view)).slab)
