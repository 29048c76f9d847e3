"""The receiver's side: device memory of another process of the host, mapped once and copied from.

A mapping stays open while it is used often: opening takes a hundred microseconds. While it is open,
the memory is not free for others, even if its owner has freed it. So a mapping ends when its
owner ends, or says that the allocation is gone, or when no message has used it for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from torchweft.channel.cuda.driver import Driver, DriverError, Range
from torchweft.channel.cuda.exports import READY
from torchweft.channel.table import BufferEntry, SharedHandle
from torchweft.errors import ProtocolError, WeftError

_EVENT_MASK = (1 << 32) - 1
_LOOKS_S = 500e-6
"""Seconds a thread looks before it sleeps: a GPU that processes share takes 200 us to change."""
_SHORTEST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3


class CannotMap(WeftError, OSError):
    """Device memory of another process cannot be mapped or read here."""


class NotReady(WeftError, TimeoutError):
    """The work that makes the memory's contents takes too long."""


class _Mapping:
    """One allocation, mapped for one device here."""

    __slots__ = ("address", "device", "last_used_s", "memory", "users")

    def __init__(self, address: int, device: int, memory: Tensor) -> None:
        self.address = address
        self.device = device
        self.memory = memory
        self.users = 0
        self.last_used_s = 0.0


class Imports:
    """The device memory of one peer. Thread-safe.

    Args:
        driver: Maps and copies.
        peer: Name of the peer, for messages.
    """

    def __init__(self, driver: Driver, peer: str) -> None:
        self._driver = driver
        self._peer = peer
        self._lock = threading.RLock()
        self._handles: dict[int, SharedHandle] = {}
        self._mappings: dict[tuple[int, int], _Mapping] = {}
        self._events: dict[int, Any] = {}

    def learn(self, handles: Iterable[SharedHandle]) -> None:
        """Keeps handles that came with a message."""
        with self._lock:
            for handle in handles:
                self._handles.setdefault(handle.number, handle)

    def pull(
        self,
        entries: Sequence[BufferEntry],
        devices: Sequence[int],
        await_events: Callable[[list[Any]], None],
    ) -> list[Tensor]:
        """Copies memory of the peer to devices of this worker. Blocks until the copies are done.

        Args:
            entries: The memory.
            devices: For each entry, the device here.
            await_events: Called with the events to wait for; see ``await_all``.

        Raises:
            CannotMap: This process cannot read the memory, or no longer can.
            ProtocolError: The entry reaches beyond its allocation, or names an unknown one.
            torch.OutOfMemoryError: A device has too little memory.
        """
        events = {
            entry.tag & _EVENT_MASK: device for entry, device in zip(entries, devices, strict=True)
        }
        events.pop(READY, None)
        if events:
            await_events([self._event(number, device) for number, device in events.items()])
        used: list[_Mapping] = []
        try:
            ranges = []
            for entry, device in zip(entries, devices, strict=True):
                mapping = self._mapping(entry.tag >> 32, device)
                used.append(mapping)
                ranges.append(self._range(mapping, entry))
            return self._driver.pull(ranges, list(devices))
        finally:
            now_s = time.monotonic()
            with self._lock:
                for mapping in used:
                    mapping.users -= 1
                    mapping.last_used_s = now_s

    def forget(self, numbers: Iterable[int]) -> None:
        """Ends the mappings of allocations that the peer has freed."""
        gone = set(numbers)
        with self._lock:
            for number in gone:
                self._handles.pop(number, None)
            ended = self._take(lambda number, mapping: number in gone)
        self._end(ended)

    def trim(self, idle_s: float) -> None:
        """Ends mappings that were idle for ``idle_s`` seconds, or whose allocation is gone."""
        before_s = time.monotonic() - idle_s
        with self._lock:
            ended = self._take(
                lambda number, mapping: (
                    mapping.last_used_s <= before_s or number not in self._handles
                )
            )
        self._end(ended)

    def close(self) -> None:
        """Ends all mappings that are not in use, and forgets all handles: the peer is lost."""
        with self._lock:
            self._handles.clear()
            self._events.clear()
            ended = self._take(lambda number, mapping: True)
        self._end(ended)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is mapped."""
        return not self._mappings

    def _take(self, is_wanted: Callable[[int, _Mapping], bool]) -> list[_Mapping]:
        taken = [
            (key, mapping)
            for key, mapping in self._mappings.items()
            if not mapping.users and is_wanted(key[0], mapping)
        ]
        for key, _ in taken:
            del self._mappings[key]
        return [mapping for _, mapping in taken]

    def _end(self, mappings: Iterable[_Mapping]) -> None:
        for mapping in mappings:
            del mapping.memory
            try:
                self._driver.close(mapping.address, mapping.device)
            except DriverError:
                pass  # The context is broken; its process will end, and the mapping with it.

    def _handle(self, number: int) -> SharedHandle:
        handle = self._handles.get(number)
        if handle is None:
            raise CannotMap(f"{self._peer} offers device memory whose handle has not come")
        return handle

    def _mapping(self, number: int, device: int) -> _Mapping:
        """Returns a mapping for one more user."""
        key = (number, device)
        with self._lock:
            mapping = self._mappings.get(key)
            if mapping is None:
                handle = self._handle(number)
                if not handle.size_bytes:
                    raise ProtocolError(f"{self._peer} offers an event as device memory")
                try:
                    address = self._driver.open(handle.content, device)
                    # The size is the driver's: the peer's would be a promise.
                    memory = self._driver.view(address, self._driver.allocation_at(address)[1])
                except (DriverError, RuntimeError) as error:
                    raise CannotMap(
                        f"device memory of {self._peer} cannot be mapped: {error}"
                    ) from None
                mapping = self._mappings[key] = _Mapping(address, device, memory)
            mapping.users += 1
            return mapping

    def _event(self, number: int, device: int) -> Any:
        with self._lock:
            event = self._events.get(number)
            if event is None:
                try:
                    event = self._driver.open_event(self._handle(number).content, device)
                except RuntimeError as error:
                    raise CannotMap(f"an event of {self._peer} cannot be opened: {error}") from None
                self._events[number] = event
            return event

    def _range(self, mapping: _Mapping, entry: BufferEntry) -> Range:
        if entry.place + entry.size_bytes > mapping.memory.numel():
            raise ProtocolError(
                f"{self._peer} offers {entry.size_bytes} bytes at {entry.place} of an allocation "
                f"of {mapping.memory.numel()} bytes"
            )
        return Range(mapping.memory, entry.place, entry.size_bytes)


def await_all(
    events: Iterable[Any], check: Callable[[], None], begin_long: Callable[[], None], limit_s: float
) -> None:
    """Blocks until events of another process are done, by looking at them.

    Args:
        events: The events.
        check: Raises the error to end the wait with, for instance if the process is lost.
        begin_long: Called once, before the thread sleeps for the first time.
        limit_s: How long to wait at most.

    Raises:
        NotReady: The limit has passed.
    """
    began_s = time.monotonic()
    is_long = False
    for event in events:
        while not event.query():
            check()
            elapsed_s = time.monotonic() - began_s
            if elapsed_s > limit_s:
                raise NotReady(f"the work behind a tensor is not done after {elapsed_s:.1f} s")
            if elapsed_s < _LOOKS_S:
                time.sleep(0)  # Other threads get the interpreter lock.
                continue
            if not is_long:
                is_long = True
                begin_long()
            time.sleep(min(max(elapsed_s / 16, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))
