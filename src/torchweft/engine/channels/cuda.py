"""The channel ``cuda_ipc``: device memory that another process of the host copies by itself.

See ``docs/protocols/devices.md``.

*The sender's side.* A tensor is offered as a range of its allocation, with the number of an event.
The event is recorded behind the work that makes the tensor. Every message has the handles of both,
so the order in which a receiver handles messages does not matter. Memory that is offered is kept
until the receiver has copied it. The receiver waits for the event on its host, never on its device:
a stream that waits for an event of a process that was killed waits for ever, as measured.

*The receiver's side.* A mapping stays open while it is used often: opening takes a hundred
microseconds. While it is open, the memory is not free for others, even if its owner has freed it.
So a mapping ends when its owner ends, or when no message has used it for a while.

The handle, little-endian::

    allocation u32 | event u32, 0 for none | offset in the allocation u64
    64 bytes with which the allocation is mapped | 64 bytes with which the event is opened

*The driver.* torch's own handles (``UntypedStorage._share_cuda_``) keep a counter in a file for
each tensor that is sent, and change the tensor's storage. So ``Driver`` asks the driver itself, for
whole allocations: a handle is made once, a mapping is opened once, and tensors are ranges of it.

An address says nothing about identity: an allocation may be freed and another one begin at the same
place. The driver's buffer id never comes again within a process, and names the allocation here.

Everything else is torch's: memory of the caching allocator, streams, events and copies.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft import knobs
from torchweft.engine.channels.channel import CannotGet, Channel, Entry, Handle, Home, Meeting, Peer
from torchweft.engine.channels.device_copies import GpuCalls, Staging, copy_to_devices
from torchweft.errors import ProtocolError, SerializationError, WeftError
from torchweft.free_threading import shared_count

# The driver

HANDLE_BYTES = 64

_BUFFER_ID, _DEVICE, _RANGE_START, _RANGE_BYTES = 7, 9, 11, 12
_LAZY_PEER_ACCESS = 1
_INVALID_VALUE, _INVALID_CONTEXT = 1, 201
_CudaEvent: Any = torch.cuda.Event


@dataclass(eq=False, repr=False, match_args=False)
class DriverError(WeftError, RuntimeError):
    """The CUDA driver refused a call.

    Attributes:
        code: The driver's number of the error.
    """

    code: int = 0


class _Handle(ctypes.Structure):
    _fields_ = (("content", ctypes.c_char * HANDLE_BYTES),)


class _Mapped:
    """Memory at an address, for ``torch.as_tensor``."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@functools.cache
def find_driver() -> Driver | None:
    """Returns the driver of this machine; None where there is none, or torch was built without."""
    if torch.version.cuda is None:
        return None
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None


class Driver:
    """Shares allocations and events, and copies between them. Thread-safe.

    Tests replace it by one whose devices are in the host's memory.

    Args:
        library: The driver's library.
    """

    def __init__(self, library: Any) -> None:
        self._attribute = library.cuPointerGetAttribute
        self._attribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
        self._export = library.cuIpcGetMemHandle
        self._export.argtypes = (ctypes.POINTER(_Handle), ctypes.c_uint64)
        self._open = library.cuIpcOpenMemHandle_v2
        self._open.argtypes = (ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
        self._close = library.cuIpcCloseMemHandle
        self._close.argtypes = (ctypes.c_uint64,)
        self._text = library.cuGetErrorString
        self._text.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
        self._calls = GpuCalls()

    def index_of(self, tensor: Tensor) -> int | None:
        """Returns the number of the CUDA device that a tensor is on; None if it is on none."""
        return tensor.device.index if tensor.is_cuda else None

    # Allocations

    def buffer_id(self, address: int) -> int:
        """Returns the number of the allocation at an address; 0 if it has been freed."""
        try:
            return self._read_attribute(_BUFFER_ID, address)
        except DriverError as error:
            if error.code == _INVALID_VALUE:
                return 0
            raise

    def allocation_at(self, address: int) -> tuple[int, int]:
        """Returns where the allocation around an address begins, and its size in bytes."""
        start = self._read_attribute(_RANGE_START, address)
        return start, self._read_attribute(_RANGE_BYTES, address)

    def export(self, start: int) -> bytes:
        """Returns the handle by which another process opens the allocation that begins here.

        Raises:
            DriverError: It cannot be shared, like memory of ``expandable_segments``.
        """
        handle = _Handle()
        self._check("cuIpcGetMemHandle", self._export(ctypes.byref(handle), start))
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open(self, handle: bytes, device: int) -> int:
        """Maps an allocation of another process for a device here; returns its address.

        Raises:
            DriverError: This process cannot map it, or the other process has ended.
        """
        structure = _Handle.from_buffer_copy(handle)
        address = ctypes.c_uint64()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # Makes the device's context that of the thread.
            code = self._open(ctypes.byref(address), structure, _LAZY_PEER_ACCESS)
        self._check("cuIpcOpenMemHandle", code)
        return address.value

    def close(self, address: int, device: int) -> None:
        """Ends a mapping that ``open`` made. Nothing may use it any more."""
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()
            self._check("cuIpcCloseMemHandle", self._close(address))

    def view(self, address: int, size_bytes: int) -> Tensor:
        """Returns a mapping as a tensor of bytes, which does not keep the mapping open."""
        # A device is named, so that no default device of this thread makes it a copy.
        device = torch.device("cuda", self._read_attribute(_DEVICE, address))
        return torch.as_tensor(_Mapped(address, size_bytes), device=device)

    # Events

    def stream(self, device: int) -> Any:
        """Returns this thread's current stream of a device."""
        return torch.cuda.current_stream(device)

    def new_event(self) -> Any:
        """Returns an event that another process can open once it has been recorded."""
        return _CudaEvent(interprocess=True)

    def handle_of(self, event: Any) -> bytes:
        """Returns the handle by which another process opens an event."""
        return bytes(event.ipc_handle())

    def open_event(self, handle: bytes, device: int) -> Any:
        """Opens an event of another process.

        Raises:
            RuntimeError: It cannot be opened, or the other process has ended.
        """
        return _CudaEvent.from_ipc_handle(torch.device("cuda", device), handle)

    # Copies

    def pull(self, sources: list[Tensor], devices: list[int]) -> list[Tensor]:
        """Copies mapped memory to new memory, each on the device given; see ``copy_to_devices``."""
        wanted = [torch.device("cuda", device) for device in devices]
        return copy_to_devices(self._calls, sources, wanted)

    def _read_attribute(self, attribute: int, address: int) -> int:
        value = ctypes.c_uint64()
        code = self._attribute(ctypes.addressof(value), attribute, address)
        if code == _INVALID_CONTEXT:
            torch.cuda.current_stream().query()  # This thread has not used CUDA yet.
            code = self._attribute(ctypes.addressof(value), attribute, address)
        self._check("cuPointerGetAttribute", code)
        return value.value

    def _check(self, call: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._text(code, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise DriverError(f"{call} failed: {reason} ({code})", code)


# What is shared

NO_CUDA = "there is no CUDA here"
"""The obstacle of processes without GPUs."""
_NUMBER_LIMIT = 1 << 32
READY = 0
"""The number in place of an event's where nothing is to be waited for."""
_PLACE = struct.Struct(f"<IIQ{HANDLE_BYTES}s{HANDLE_BYTES}s")


class Place(NamedTuple):
    """Where a tensor lies at its sender.

    Attributes:
        allocation: Number of its allocation.
        event: Number of the event behind the work that makes it, or ``READY``.
        offset: Where it begins in the allocation.
        memory: The handle of the allocation.
        work: The handle of the event.
    """

    allocation: int
    event: int
    offset: int
    memory: bytes
    work: bytes


class Allocation(NamedTuple):
    """An allocation that can be shared: where it begins here, its number, and its handle."""

    start: int
    number: int
    handle: bytes


class _Event(NamedTuple):
    """An event that can be shared, and the device whose work it marks."""

    number: int
    handle: bytes
    event: Any
    device: int


class Offered(Handle):
    """Memory that a peer may read, kept until the peer has copied it, or is lost."""

    __slots__ = ("_exports", "_ready")
    is_slow = True

    def __init__(
        self, exports: Exports, tensor: Tensor, allocation: Allocation, ready: _Event | None
    ) -> None:
        start, number, handle = allocation
        event, work = (READY, b"") if ready is None else ready[:2]
        content = _PLACE.pack(number, event, tensor.data_ptr() - start, handle, work)
        super().__init__(content, tensor.numel() * tensor.element_size(), tensor)
        self._exports, self._ready = exports, ready

    def memory(self) -> memoryview:
        """Returns a copy on the host. Blocks until the contents are made and copied."""
        if self._ready is not None:
            self._ready.event.synchronize()  # This thread's stream is another one.
        return self._exports.staging.to_host([self.kept])[0]

    def __del__(self) -> None:
        if self._ready is not None:
            self._exports.idle(self._ready.device).append(self._ready)  # No peer looks at it.


class Exports:
    """The allocations and events that one worker shares. Thread-safe.

    Args:
        driver: Shares them.
        staging: Copies their memory to the host, for peers that cannot read it.
    """

    def __init__(self, driver: Driver, staging: Staging) -> None:
        self._driver = driver
        self.staging = staging
        self._numbers = shared_count(1)
        self._lock = threading.RLock()
        self._allocations: dict[int, Allocation | None] = {}
        self._idle: dict[int, deque[_Event]] = {}

    def offer(self, tensor: Tensor, device: int) -> Offered | None:
        """Offers the memory of a flat tensor on a device; None if it cannot be shared.

        To be called in a thread on whose current stream the contents are made.
        """
        found = self._find(tensor.data_ptr())
        if found is None:
            return None
        stream = self._driver.stream(device)
        ready = None if stream.query() else self._record(device, stream)
        return Offered(self, tensor, found, ready)

    def idle(self, device: int) -> deque[_Event]:
        """Returns the events of a device that nothing waits for; any thread may append one."""
        return self._idle.setdefault(device, deque())

    def forget_freed(self) -> None:
        """Drops allocations that have been freed."""
        with self._lock:
            known = list(self._allocations.items())
        for buffer_id, allocation in known:
            if allocation is None or self._driver.buffer_id(allocation.start) != buffer_id:
                with self._lock:
                    self._allocations.pop(buffer_id, None)

    def _find(self, address: int) -> Allocation | None:
        buffer_id = self._driver.buffer_id(address)
        try:
            return self._allocations[buffer_id]
        except KeyError:
            pass
        start, _ = self._driver.allocation_at(address)
        with self._lock:
            if buffer_id not in self._allocations:
                self._allocations[buffer_id] = self._export(start)
            return self._allocations[buffer_id]

    def _export(self, start: int) -> Allocation | None:
        number = next(self._numbers)
        if number >= _NUMBER_LIMIT:
            return None
        try:
            return Allocation(start, number, self._driver.export(start))
        except DriverError:
            return None

    def _record(self, device: int, stream: Any) -> _Event | None:
        """Returns an event behind the present work of a stream.

        Where no more events can be shared, it blocks until the work is done, and returns None.
        """
        try:
            made = self.idle(device).pop()
        except IndexError:
            try:
                event = self._driver.new_event()
                event.record(stream)
                handle = self._driver.handle_of(event)
            except RuntimeError:
                stream.synchronize()
                return None
            return _Event(next(self._numbers), handle, event, device)
        made.event.record(stream)
        return made


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
        home: What the channel needs of its worker.
        driver: Maps and copies.
        peer: The peer.
    """

    def __init__(self, home: Home, driver: Driver, peer: Peer) -> None:
        self._home = home
        self._driver = driver
        self._peer = peer
        self._lock = threading.RLock()
        self._mappings: dict[tuple[int, int], _Mapping] = {}
        self._events: dict[int, Any] = {}

    def pull(
        self,
        places: Sequence[Place],
        sizes: Sequence[int],
        devices: Sequence[int],
        limit_s: float,
    ) -> list[Tensor]:
        """Copies memory of the peer to devices of this worker. Blocks until the copies are done.

        Args:
            places: Where the memory is at the peer.
            sizes: Its sizes in bytes.
            devices: The devices of the copies here.
            limit_s: How long to wait for the contents.

        Raises:
            CannotGet: This process cannot read the memory, or no longer can.
            ProtocolError: The memory reaches beyond its allocation.
            torch.OutOfMemoryError: A device has too little memory.
        """
        placed = list(zip(places, devices, strict=True))
        events = {each.event: (each, device) for each, device in placed if each.event != READY}
        if events:
            found = [self._event(*each) for each in events.values()]
            self._home.wait_for(self._peer, found, limit_s)
        used: list[_Mapping] = []
        sources: list[Tensor] = []
        try:
            for (place, device), size_bytes in zip(placed, sizes, strict=True):
                mapping = self._mapping(place, device)
                used.append(mapping)
                sources.append(self._range(mapping, place.offset, size_bytes))
            return self._driver.pull(sources, list(devices))
        finally:
            sources.clear()
            now_s = time.monotonic()
            with self._lock:
                for mapping in used:
                    mapping.users -= 1
                    mapping.last_used_s = now_s

    def trim(self, idle_s: float) -> None:
        """Ends mappings that were idle for ``idle_s`` seconds."""
        before_s = time.monotonic() - idle_s
        with self._lock:
            ended = {
                key: mapping
                for key, mapping in self._mappings.items()
                if not mapping.users and mapping.last_used_s <= before_s
            }
            for key in ended:
                del self._mappings[key]
        for mapping in ended.values():
            del mapping.memory
            try:
                self._driver.close(mapping.address, mapping.device)
            except DriverError:
                pass  # The context is broken; its process will end, and the mapping with it.

    def close(self) -> None:
        """Ends all mappings that are not in use: the peer is lost."""
        with self._lock:
            self._events.clear()
        self.trim(0.0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is mapped."""
        return not self._mappings

    def _mapping(self, place: Place, device: int) -> _Mapping:
        """Returns a mapping for one more user."""
        key = (place.allocation, device)
        with self._lock:
            mapping = self._mappings.get(key)
            if mapping is None:
                try:
                    address = self._driver.open(place.memory, device)
                    # The size is the driver's: the peer's would be a promise.
                    memory = self._driver.view(address, self._driver.allocation_at(address)[1])
                except (DriverError, RuntimeError) as error:
                    raise CannotGet(
                        f"device memory of worker {self._peer.name!r} cannot be mapped: {error}"
                    ) from None
                mapping = self._mappings[key] = _Mapping(address, device, memory)
            mapping.users += 1
            return mapping

    def _event(self, place: Place, device: int) -> Any:
        with self._lock:
            event = self._events.get(place.event)
            if event is None:
                try:
                    event = self._driver.open_event(place.work, device)
                except RuntimeError as error:
                    raise CannotGet(
                        f"an event of worker {self._peer.name!r} cannot be opened: {error}"
                    ) from None
                self._events[place.event] = event
            return event

    def _range(self, mapping: _Mapping, offset: int, size_bytes: int) -> Tensor:
        if offset + size_bytes > mapping.memory.numel():
            raise ProtocolError(
                f"worker {self._peer.name!r} offers {size_bytes} bytes at {offset} of an "
                f"allocation of {mapping.memory.numel()} bytes"
            )
        return mapping.memory.narrow(0, offset, size_bytes)


class CudaIpc(Channel):
    """Tensors that a receiver on the same host copies from the sender's device."""

    name, number = "cuda_ipc", 5
    is_for_devices = True

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self._is_allowed = bool(knobs.CUDA_IPC.get())
        self._driver = find_driver() if self._is_allowed else None
        self._exports: Exports | None = None
        if self._driver is not None:
            self._exports = Exports(self._driver, Staging(home.page_locks))
        self._imports: dict[int, Imports] = {}
        self._lock = threading.RLock()
        self._small_bytes = knobs.SMALL_ON_DEVICE_BYTES.get()
        self._look_s = knobs.SMALL_ON_DEVICE_S.get()
        self._stall_s = knobs.DEVICE_STALL_S.get()

    def describe(self) -> dict[str, object]:
        """Says whether there is a driver; does not start CUDA."""
        if not self._is_allowed:
            return {"obstacle": f"{knobs.CUDA_IPC.variable}=0 is set"}
        return {"obstacle": "" if self._driver is not None else NO_CUDA}

    def accept(self, peer: Peer, meeting: Meeting) -> str:
        """Returns why this process cannot copy out of the peer's device memory.

        More is found out by the first tensor: a trial would start CUDA in processes that need none.
        """
        here, there = meeting.here, meeting.there
        obstacle = meeting.obstacle(str(self.describe()["obstacle"]))
        if obstacle:
            return obstacle
        if not meeting.is_one_host:
            return f"the peer is on another host ({there.hostname})"
        if here.pid == there.pid and here.pid_namespace == there.pid_namespace:
            return "the peer is this process"
        return ""

    # Sending

    def put(self, peer: Peer, token: int, buffers: Sequence[Tensor]) -> Sequence[Handle | None]:
        """Offers memory of devices to the peer.

        Small tensors whose values are there are not taken: through the host they are faster. To be
        called in a thread on whose current streams the values are made.
        """
        exports, driver = self._exports, self._driver
        if exports is None or driver is None:
            return ()
        indices = [driver.index_of(buffer) for buffer in buffers]
        used = {index for index in indices if index is not None}
        size_bytes = sum(
            [each.nbytes for each, index in zip(buffers, indices, strict=True) if index is not None]
        )
        if size_bytes <= self._small_bytes and self._are_done(driver, used):
            return ()
        return [
            None if index is None else exports.offer(buffer, index)
            for buffer, index in zip(buffers, indices, strict=True)
        ]

    def _are_done(self, driver: Driver, devices: set[int]) -> bool:
        """Whether the work on this thread's current streams is done, now or in a moment."""
        streams = [driver.stream(device) for device in devices]
        end_s = time.perf_counter() + self._look_s
        while not all(stream.query() for stream in streams):
            if time.perf_counter() > end_s:
                return False
        return True

    # Receiving

    def get(self, peer: Peer, token: int, entries: Sequence[Entry]) -> Sequence[Tensor]:
        """Copies the device memory of a message to devices of this worker. Blocks until it is done.

        Raises:
            CannotGet: This process cannot read the memory, or its contents take too long.
            ProtocolError: The sender's handles are impossible.
            WeftError: The sender was lost before its memory could be copied.
            torch.OutOfMemoryError: A device here has too little memory.
        """
        imports = self._imports_of(peer)
        places = [_place(entry.content) for entry in entries]
        sizes = [entry.size_bytes for entry in entries]
        devices = [_index(entry.device) for entry in entries]
        try:
            return imports.pull(places, sizes, devices, self._stall_s)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(self._home.name, peer, sum(sizes), error) from None

    def _imports_of(self, peer: Peer) -> Imports:
        if self._driver is None:
            raise CannotGet(NO_CUDA)
        with self._lock:
            imports = self._imports.get(peer.id)
            if imports is None:
                imports = self._imports[peer.id] = Imports(self._home, self._driver, peer)
            return imports

    # Housekeeping

    def tick(self, now_s: float) -> None:
        """Ends mappings that are not used, and forgets allocations that are gone."""
        for worker, imports in list(self._imports.items()):
            imports.trim(self._home.idle_s)
            if self._home.peers[worker].is_over and imports.is_empty:
                self._imports.pop(worker, None)
        if self._exports is not None:
            self._exports.forget_freed()

    def lost(self, peer: Peer) -> None:
        """Ends the mappings of a lost worker's memory."""
        imports = self._imports.get(peer.id)
        if imports is not None:
            imports.close()

    def close(self, limit_s: float) -> None:
        for imports in list(self._imports.values()):
            imports.close()


def out_of_memory(name: str, peer: Peer, size_bytes: int, error: Exception) -> Exception:
    """Returns the error of a worker whose device has no room for tensors of a peer."""
    return torch.OutOfMemoryError(
        f"worker {name!r} has no room on its GPU for {size_bytes} bytes of "
        f"tensors from worker {peer.name!r}: {error}"
    )


def _place(content: bytes) -> Place:
    if len(content) != _PLACE.size:
        raise ProtocolError(f"a handle of device memory has {len(content)} bytes")
    return Place(*_PLACE.unpack(content))


def _index(device: torch.device | None) -> int:
    if device is None or device.type != "cuda":
        raise SerializationError(
            f"device memory of a worker is to become a tensor on {device or 'the CPU'}"
        )
    return device.index or 0
