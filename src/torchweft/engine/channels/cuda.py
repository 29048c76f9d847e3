"""The channel ``cuda_ipc``: device memory that another process of the host copies by itself.

See ``docs/protocols/devices.md``.

*The sender's side.* A tensor is offered as a range of its allocation, with the number of an event.
The event is recorded behind the work that makes the tensor. The receiver keeps the handles of
allocations and events under their numbers. A handle goes along with each message until a message
that carried it was acknowledged. So the order in which a receiver handles messages does not matter.
Memory that is offered is kept until the receiver has copied it. The receiver waits for the event on
its host, never on its device: a stream that waits for an event of a process that was killed waits
for ever, as measured.

*The receiver's side.* A mapping stays open while it is used often: opening takes a hundred
microseconds. While it is open, the memory is not free for others, even if its owner has freed it.
So a mapping ends when its owner ends, or says that the allocation is gone, or when no message has
used it for a while.

The handle, little-endian::

    allocation u32 | event u32, 0 for none | offset in the allocation u64
    then for what the receiver may not have: number u32 | size u64, 0 for an event | 64 bytes

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft import knobs
from torchweft.engine.channels.channel import CannotGet, Channel, Entry, Handle, Home, Meeting, Peer
from torchweft.engine.channels.device_copies import Staging
from torchweft.engine.wire.frames import Buffer
from torchweft.engine.wire.messages import Kind, decode_ints, encode_ints
from torchweft.errors import ProtocolError, SerializationError, WeftError
from torchweft.free_threading import shared_count

# The driver

HANDLE_BYTES = 64

_BUFFER_ID, _DEVICE, _RANGE_START, _RANGE_BYTES = 7, 9, 11, 12
_LAZY_PEER_ACCESS = 1
_INVALID_VALUE, _INVALID_CONTEXT = 1, 201
_CudaEvent: Any = torch.cuda.Event
_CudaStream: Any = torch.cuda.Stream


@dataclass(eq=False, repr=False, match_args=False)
class DriverError(WeftError, RuntimeError):
    """The CUDA driver refused a call.

    Attributes:
        code: The driver's number of the error.
    """

    code: int = 0


class Range(NamedTuple):
    """A part of an allocation that this process has mapped.

    Attributes:
        memory: All of the allocation, as bytes.
        offset: Where the part begins.
        size_bytes: Its length.
    """

    memory: Tensor
    offset: int
    size_bytes: int


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
        self._copy_streams: dict[int, Any] = {}

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

    def pull(self, ranges: list[Range], devices: list[int]) -> list[Tensor]:
        """Copies ranges to new memory, each on the device given. Blocks until that is done.

        The copies run on a stream of their own: they do not wait for earlier work of this thread.
        The new memory is for the current streams of this thread.

        Returns:
            Tensors of bytes.

        Raises:
            torch.OutOfMemoryError: A device has too little memory.
        """
        before = torch.cuda.current_device()
        pulled: list[Tensor] = []
        ends: dict[int, Any] = {}
        try:
            for each, device in zip(ranges, devices, strict=True):
                own = torch.cuda.current_stream(device)
                stream = self._copy_stream(device)
                torch.cuda.set_stream(stream)
                try:
                    target = torch.empty(
                        each.size_bytes, dtype=torch.uint8, device=torch.device("cuda", device)
                    )
                    source = each.memory.narrow(0, each.offset, each.size_bytes)
                    target.copy_(source, non_blocking=True)
                    if device not in ends:
                        ends[device] = _CudaEvent()
                    ends[device].record(stream)
                finally:
                    torch.cuda.set_stream(own)
                target.record_stream(own)
                pulled.append(target)
        finally:
            # Also after a failure: the ranges must not be in use once this method has ended.
            for end in ends.values():
                end.synchronize()
            torch.cuda.set_device(before)
        return pulled

    def _copy_stream(self, device: int) -> Any:
        stream = self._copy_streams.get(device)
        if stream is None:
            # Two threads may both make one; either may be used.
            stream = self._copy_streams[device] = _CudaStream(device)
        return stream

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
_PLACE = struct.Struct("<IIQ")
_HANDLE = struct.Struct(f"<IQ{HANDLE_BYTES}s")


class SharedHandle(NamedTuple):
    """Makes an allocation, or an event (of size 0), of another process accessible."""

    number: int
    size_bytes: int
    content: bytes


class Place(NamedTuple):
    """Where a tensor lies at its sender: numbers of its allocation and event, and its offset."""

    allocation: int
    event: int
    offset: int


class Allocation(NamedTuple):
    """An allocation that can be shared: where it begins here, and its handle."""

    start: int
    shared: SharedHandle


class _Event(NamedTuple):
    """An event that can be shared, and the device whose work it marks."""

    shared: SharedHandle
    event: Any
    device: int


class Offered(Handle):
    """Memory that a peer may read, kept until the peer has copied it, or is lost.

    Attributes:
        place: Where it is.
        needed: The handles that the peer needs.
    """

    __slots__ = ("_exports", "_known", "_ready", "needed", "place")
    is_slow = True

    def __init__(
        self, exports: Exports, tensor: Tensor, allocation: Allocation, ready: _Event | None
    ) -> None:
        super().__init__(b"", tensor.numel() * tensor.element_size(), tensor)
        self._exports, self._ready = exports, ready
        shared, offset = allocation.shared, tensor.data_ptr() - allocation.start
        self.place = Place(shared.number, READY if ready is None else ready.shared.number, offset)
        self.needed = (shared,) if ready is None else (shared, ready.shared)
        self._known: set[int] = set()

    def address_to(self, known: set[int], sent: set[int]) -> None:
        """Makes the content for a peer.

        Args:
            known: The numbers of the handles that the peer has for certain.
            sent: The numbers of those that the message has already; new ones are added.
        """
        self._known = known
        missing = [each for each in self.needed if each.number not in known | sent]
        sent.update([each.number for each in missing])
        packed = [_HANDLE.pack(*each) for each in missing]
        self.content = b"".join((_PLACE.pack(*self.place), *packed))

    def memory(self) -> memoryview:
        """Returns a copy on the host. Blocks until the contents are made and copied."""
        if self._ready is not None:
            self._ready.event.synchronize()  # This thread's stream is another one.
        return self._exports.staging.to_host([self.kept])[0]

    def acknowledge(self) -> None:
        self._known.update([each.number for each in self.needed])

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
        return [allocation.shared.number for _, allocation in gone if allocation is not None]

    def _find(self, address: int) -> Allocation | None:
        buffer_id = self._driver.buffer_id(address)
        try:
            return self._allocations[buffer_id]
        except KeyError:
            pass
        start, size_bytes = self._driver.allocation_at(address)
        with self._lock:
            if buffer_id not in self._allocations:
                self._allocations[buffer_id] = self._export(start, size_bytes)
            return self._allocations[buffer_id]

    def _export(self, start: int, size_bytes: int) -> Allocation | None:
        number = next(self._numbers)
        if number >= _NUMBER_LIMIT:
            return None
        try:
            return Allocation(start, SharedHandle(number, size_bytes, self._driver.export(start)))
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
            return _Event(SharedHandle(next(self._numbers), 0, handle), event, device)
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
        places: Sequence[Place],
        sizes: Sequence[int],
        devices: Sequence[int],
        await_events: Callable[[list[Any]], None],
    ) -> list[Tensor]:
        """Copies memory of the peer to devices of this worker. Blocks until the copies are done.

        Args:
            places: Where the memory is at the peer.
            sizes: Its sizes in bytes.
            devices: The devices of the copies here.
            await_events: Called with the events to wait for.

        Raises:
            CannotGet: This process cannot read the memory, or no longer can.
            ProtocolError: The memory reaches beyond its allocation.
            torch.OutOfMemoryError: A device has too little memory.
        """
        events = {place.event: device for place, device in zip(places, devices, strict=True)}
        events.pop(READY, None)
        if events:
            await_events([self._event(number, device) for number, device in events.items()])
        used: list[_Mapping] = []
        try:
            ranges = []
            for place, size_bytes, device in zip(places, sizes, devices, strict=True):
                mapping = self._mapping(place.allocation, device)
                used.append(mapping)
                ranges.append(self._range(mapping, place.offset, size_bytes))
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
        self._end(lambda number, mapping: number in gone)

    def trim(self, idle_s: float) -> None:
        """Ends mappings that were idle for ``idle_s`` seconds, or whose allocation is gone."""
        before_s = time.monotonic() - idle_s
        self._end(
            lambda number, mapping: mapping.last_used_s <= before_s or number not in self._handles
        )

    def close(self) -> None:
        """Ends all mappings that are not in use, and forgets all handles: the peer is lost."""
        with self._lock:
            self._handles.clear()
            self._events.clear()
        self._end(lambda number, mapping: True)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is mapped."""
        return not self._mappings

    def _end(self, is_wanted: Callable[[int, _Mapping], bool]) -> None:
        """Ends the wanted ones of the mappings that nothing uses."""
        with self._lock:
            ended = {
                key: mapping
                for key, mapping in self._mappings.items()
                if not mapping.users and is_wanted(key[0], mapping)
            }
            for key in ended:
                del self._mappings[key]
        for mapping in ended.values():
            del mapping.memory
            try:
                self._driver.close(mapping.address, mapping.device)
            except DriverError:
                pass  # The context is broken; its process will end, and the mapping with it.

    def _handle(self, number: int) -> SharedHandle:
        handle = self._handles.get(number)
        if handle is None:
            raise CannotGet(f"{self._peer} offers device memory whose handle has not come")
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
                    raise CannotGet(
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
                    raise CannotGet(f"an event of {self._peer} cannot be opened: {error}") from None
                self._events[number] = event
            return event

    def _range(self, mapping: _Mapping, offset: int, size_bytes: int) -> Range:
        if offset + size_bytes > mapping.memory.numel():
            raise ProtocolError(
                f"{self._peer} offers {size_bytes} bytes at {offset} of an allocation "
                f"of {mapping.memory.numel()} bytes"
            )
        return Range(mapping.memory, offset, size_bytes)


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
        self._known: dict[int, set[int]] = {}
        """The numbers of the handles that a peer has for certain."""
        self._imports: dict[int, Imports] = {}
        self._lock = threading.RLock()
        self._small_bytes = knobs.SMALL_ON_DEVICE_BYTES.get()
        self._look_s = knobs.SMALL_ON_DEVICE_S.get()
        self._stall_s = knobs.DEVICE_STALL_S.get()
        home.on(Kind.DEVICE_FREED, self._on_freed)

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
        obstacle, theirs = str(self.describe()["obstacle"]), meeting.text("obstacle")
        if obstacle:
            return obstacle
        if theirs:
            return f"of the peer: {theirs}"
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
        known, sent = self._known.setdefault(peer.id, set()), set[int]()
        handles: list[Handle | None] = []
        for buffer, index in zip(buffers, indices, strict=True):
            offered = None if index is None else exports.offer(buffer, index)
            if offered is not None:
                offered.address_to(known, sent)
            handles.append(offered)
        return handles

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
        places = [_learn(imports, entry) for entry in entries]
        sizes = [entry.size_bytes for entry in entries]
        devices = [_index(entry.device) for entry in entries]
        try:
            return imports.pull(
                places,
                sizes,
                devices,
                lambda events: self._home.wait_for(peer, events, self._stall_s),
            )
        except torch.OutOfMemoryError as error:
            raise out_of_memory(self._home.name, peer, sum(sizes), error) from None

    def drop(self, peer: Peer, token: int, entries: Sequence[Entry]) -> None:
        """Keeps the handles of a message nevertheless: the sender takes them as known."""
        if self._driver is not None:
            imports = self._imports_of(peer)
            for entry in entries:
                _learn(imports, entry)

    def _imports_of(self, peer: Peer) -> Imports:
        if self._driver is None:
            raise CannotGet(NO_CUDA)
        with self._lock:
            imports = self._imports.get(peer.id)
            if imports is None:
                imports = self._imports[peer.id] = Imports(self._driver, f"worker {peer.name!r}")
            return imports

    # Housekeeping

    def _on_freed(self, peer: Peer, control: Buffer) -> None:
        # Decoded here, so that a malformed message is a violation; ending a mapping may block.
        self._home.reactor.submit(self._forget, peer, decode_ints(control))

    def _forget(self, peer: Peer, numbers: Sequence[int]) -> None:
        """Ends the mappings of allocations that a peer has freed."""
        imports = self._imports.get(peer.id)
        if imports is not None:
            imports.forget(numbers)

    def tick(self, now_s: float) -> None:
        """Ends mappings that are not used, and tells peers of allocations that are gone."""
        for worker, imports in list(self._imports.items()):
            imports.trim(self._home.idle_s)
            if self._home.peers[worker].is_over and imports.is_empty:
                self._imports.pop(worker, None)
        if self._exports is None or not self._known:
            return
        gone = self._exports.forget_freed()
        for worker, known in list(self._known.items()):
            numbers = sorted(known.intersection(gone))
            known.difference_update(numbers)
            if numbers:
                self._home.post(self._home.peers[worker], Kind.DEVICE_FREED, encode_ints(*numbers))

    def lost(self, peer: Peer) -> None:
        """Ends the mappings of a lost worker's memory."""
        self._known.pop(peer.id, None)
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


def _learn(imports: Imports, entry: Entry) -> Place:
    """Returns the place in a handle; keeps the handles of allocations and events in it."""
    place, rest = entry.content[: _PLACE.size], entry.content[_PLACE.size :]
    if len(place) != _PLACE.size or len(rest) % _HANDLE.size:
        raise ProtocolError(f"a handle of device memory has {len(entry.content)} bytes")
    imports.learn(SharedHandle(*fields) for fields in _HANDLE.iter_unpack(rest))
    return Place(*_PLACE.unpack(place))


def _index(device: torch.device | None) -> int:
    if device is None or device.type != "cuda":
        raise SerializationError(
            f"device memory of a worker is to become a tensor on {device or 'the CPU'}"
        )
    return device.index or 0
