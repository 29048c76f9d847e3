"""The sender's side: device memory that other processes of the host may read.

A tensor is offered as a range of its allocation, with the number of an event. The event is recorded
behind the work that makes the tensor. The receiver keeps the handles of allocations and events
under their numbers. A handle goes along with each message until a message that carried it was
acknowledged. So the order in which a receiver handles messages does not matter.

Memory that is offered is kept until the receiver has copied it. The receiver waits for the event on
its host, never on its device: a stream that waits for an event of a process that was killed waits
for ever, as measured.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from torchweft.channel.cuda.driver import Driver, DriverError
from torchweft.channel.table import CUDA_IPC, BufferEntry, SharedHandle
from torchweft.free_threading import shared_count

_NUMBER_LIMIT = 1 << 32
READY = 0
"""The number in place of an event's where nothing is to be waited for."""


class Allocation(NamedTuple):
    """An allocation that can be shared, and its number among this worker's handles."""

    number: int
    buffer_id: int
    start: int
    size_bytes: int
    handle: bytes


class _Event(NamedTuple):
    number: int
    event: Any
    device: int


class Offered:
    """Memory that a peer may read, kept until the peer has copied it, or is lost.

    Attributes:
        tensor: The memory, as a flat tensor on a device.
        entry: Its entry in the table of its message.
        nbytes: Its size.
        handles: The handles that the peer needs.
    """

    __slots__ = ("_idle", "_ready", "entry", "handles", "nbytes", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        entry: BufferEntry,
        handles: tuple[SharedHandle, ...],
        ready: _Event | None,
        idle: deque[_Event],
    ) -> None:
        self.tensor = tensor
        self.entry = entry
        self.nbytes = entry.size_bytes
        self.handles = handles
        self._ready = ready
        self._idle = idle

    def is_ready(self) -> bool:
        """Whether the work that makes the memory's contents is done."""
        return self._ready is None or bool(self._ready.event.query())

    def __del__(self) -> None:
        if self._ready is not None:
            self._idle.append(self._ready)  # No peer looks at the event any more.


class Exports:
    """The allocations and events that one worker shares. Thread-safe.

    Args:
        driver: Shares them.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._numbers = shared_count(1)
        self._lock = threading.RLock()
        self._allocations: dict[int, Allocation | None] = {}
        self._idle: dict[int, deque[_Event]] = {}
        self._handles: dict[int, bytes] = {}

    def offer(self, tensor: Tensor, device: int) -> Offered | None:
        """Offers the memory of a flat tensor on a device; None if it cannot be shared.

        To be called in a thread on whose current stream the contents are made.
        """
        found = self._find(tensor.data_ptr())
        if found is None:
            return None
        stream = self._driver.stream(device)
        ready = None if stream.query() else self._record(device, stream)
        number = READY if ready is None else ready.number
        entry = BufferEntry(
            CUDA_IPC,
            tensor.numel() * tensor.element_size(),
            tensor.data_ptr() - found.start,
            found.number << 32 | number,
        )
        handles = [SharedHandle(found.number, found.size_bytes, found.handle)]
        if ready is not None:
            handles.append(SharedHandle(number, 0, self._handles[number]))
        idle = self._idle.setdefault(device, deque())
        return Offered(tensor, entry, tuple(handles), ready, idle)

    def forget_freed(self) -> list[int]:
        """Drops allocations that have been freed; returns their numbers, for the peers."""
        with self._lock:
            known = list(self._allocations.items())
        gone = [
            (buffer_id, allocation)
            for buffer_id, allocation in known
            if allocation is None or self._driver.buffer_id(allocation.start) != buffer_id
        ]
        with self._lock:
            for buffer_id, _ in gone:
                self._allocations.pop(buffer_id, None)
        return [allocation.number for _, allocation in gone if allocation is not None]

    def _find(self, address: int) -> Allocation | None:
        buffer_id = self._driver.buffer_id(address)
        try:
            return self._allocations[buffer_id]
        except KeyError:
            pass
        start, size_bytes = self._driver.allocation_at(address)
        with self._lock:
            if buffer_id not in self._allocations:
                self._allocations[buffer_id] = self._export(buffer_id, start, size_bytes)
            return self._allocations[buffer_id]

    def _export(self, buffer_id: int, start: int, size_bytes: int) -> Allocation | None:
        number = next(self._numbers)
        if number >= _NUMBER_LIMIT:
            return None
        try:
            handle = self._driver.export(start)
        except DriverError:
            return None
        return Allocation(number, buffer_id, start, size_bytes, handle)

    def _record(self, device: int, stream: Any) -> _Event | None:
        """Returns an event behind the present work of a stream.

        Where no more events can be shared, it blocks until the work is done, and returns None.
        """
        try:
            made = self._idle.setdefault(device, deque()).pop()
        except IndexError:
            try:
                made = _Event(next(self._numbers), self._driver.new_event(), device)
                made.event.record(stream)
                self._handles[made.number] = self._driver.handle_of(made.event)
            except RuntimeError:
                stream.synchronize()
                return None
        else:
            made.event.record(stream)
        return made


class KnownHandles:
    """The handles that a peer has for certain. Thread-safe."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()

    def missing(self, offered: Iterable[Offered]) -> list[SharedHandle]:
        """Returns the handles that have to go along with offered memory, each once."""
        needed = {handle.number: handle for each in offered for handle in each.handles}
        return [handle for number, handle in needed.items() if number not in self._numbers]

    def learn(self, offered: Iterable[Offered]) -> None:
        """Notes that the peer has copied offered memory."""
        for each in offered:
            self._numbers.update([handle.number for handle in each.handles])

    def forget(self, numbers: Iterable[int]) -> list[int]:
        """Notes that allocations are gone; returns those of them that the peer has."""
        known = self._numbers.intersection(numbers)
        self._numbers.difference_update(known)
        return sorted(known)
