"""One-sided reads of another host's memory, by ``torch.distributed._transport``, and slabs for it.

PyTorch has the data plane, from 2.15 on: memory is registered, described by bytes, and read by a
peer that has the description. It has no control plane: the exchange of addresses and descriptions
is Weft's. This module is the only one that names PyTorch's interface, which is not stable.

Rules that the interface sets:

- A transport has one peer. A peer reads from the start of registered memory. So every buffer under
  way has memory that was registered for it alone.
- A time limit ends the wait, not the transfer. Memory of a transfer that has not ended must not be
  used again, nor freed.
- ``Work.wait`` sleeps for a millisecond at a time, so ``Transfer.query`` looks instead.
- Operations in the order of a CUDA stream end the process if they fail. They are not used.

Registering memory takes longer than reading it. So the sender copies each buffer to a *slab*, whose
size is a power of two. The receiver reads it into a slab of its own, which then is the memory of
the tensor. The slab that was used last is taken first, as it is the warmest. The memory comes from
the warm pool, whose pages uploads to GPUs lock.

A slab of the sender comes back when its ``Staged`` ends. That is when the peer has reported that it
has the buffer, or when the message is not sent. A slab of the receiver comes back when the last
view of its tensor ends. A slab whose transfer may still be running never comes back.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from torchweft import knobs
from torchweft.channel.channel import CannotGet, Handle
from torchweft.channel.copying import Copier
from torchweft.channel.memory import Bytes
from torchweft.errors import ConfigurationError
from torchweft.free_threading import shared_count

Lease = Callable[[int], memoryview]
SLAB = struct.Struct("<IQ")
"""Begins a handle: number and size of a slab. Its description follows where the receiver may not
have it."""

NO_DEVICE = "there is no RDMA device with an active port here"
"""The obstacle of most hosts."""

_BACKEND = "nixl"
_MODULE = "torch.distributed._transport"
_DEVICES = Path("/sys/class/infiniband")
_CALL_LIMIT_S = 10.0
"""Seconds that a call may wait for another one of the same transport."""


class TransportFailed(CannotGet):
    """Memory of another host could not be read by PyTorch's transport."""


class Work(Protocol):
    """A transfer, as PyTorch returns it."""

    def is_completed(self) -> bool:
        """Whether it has ended, also by a failure."""

    def wait(self) -> bool:
        """Waits for its end; raises its error."""


class RemoteBuffer(Protocol):
    """Describes registered memory to a peer."""

    def serialize(self) -> bytes: ...

    @classmethod
    def deserialize(cls, data: bytes) -> RemoteBuffer: ...


class Memory(Protocol):
    """Memory that is registered with a transport."""

    def to_mutable_view(self, offset: int | None = None, length: int | None = None) -> Any: ...

    def to_remote_buffer(self, *, timeout: float | None = None) -> RemoteBuffer: ...


class Transport(Protocol):
    """The part of PyTorch's interface that Weft uses; see ``torch.distributed._transport``."""

    def bind(self, *, timeout: float | None = None) -> bytes: ...

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int: ...

    def register_memory(self, tensor: Tensor, *, timeout: float | None = None) -> Memory: ...

    def unregister_memory(self, memory: Memory, *, timeout: float | None = None) -> None: ...

    def read(
        self,
        local_buffer: Any,
        remote_buffer: RemoteBuffer,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | Work: ...

    def close(self, *, timeout: float | None = None) -> None: ...


class Registration(NamedTuple):
    """Registered memory; the tensor keeps it."""

    tensor: Tensor
    memory: Memory


class Transfer:
    """A read that is under way."""

    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        self._work = work

    def query(self) -> bool:
        """Whether it has ended, also by a failure; its memory is untouched from then on."""
        with _failing("looking at a transfer"):
            return self._work.is_completed()

    def check(self) -> None:
        """Raises TransportFailed if the read, which has ended, has failed."""
        with _failing("a transfer"):
            self._work.wait()


_unclosed: list[Transport] = []
"""Transports whose transfers did not end: their memory must live as long as the process."""


class Endpoint:
    """One end of a transport, for one peer and one direction. Thread-safe.

    Args:
        transport: The transport of PyTorch; owned from here on.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.RLock()  # A garbage collection may run a finalizer of the user.
        self._buffer_type: type[RemoteBuffer] | None = None
        self._is_closed = False

    def bind(self) -> bytes:
        """Returns the bytes with which the peer connects to this end."""
        with _failing("binding"), self._lock:
            return self._transport.bind(timeout=_CALL_LIMIT_S)

    def connect(self, url: bytes) -> None:
        """Connects to the peer's end; ``url`` is what ``bind`` returned there."""
        with _failing("connecting"), self._lock:
            self._transport.connect(url, timeout=_CALL_LIMIT_S)

    def register(self, memory: memoryview) -> Registration:
        """Registers host memory, which is kept until ``unregister`` or ``close``."""
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        with _failing("registering memory"), self._lock:
            self._check_open()
            return Registration(
                tensor, self._transport.register_memory(tensor, timeout=_CALL_LIMIT_S)
            )

    def unregister(self, registration: Registration) -> None:
        """Ends a registration that no transfer uses, here or at the peer."""
        with _failing("releasing memory"), self._lock:
            if not self._is_closed:
                self._transport.unregister_memory(registration.memory, timeout=_CALL_LIMIT_S)

    def describe(self, registration: Registration) -> bytes:
        """Returns the bytes with which the peer can read registered memory."""
        with _failing("describing memory"), self._lock:
            return registration.memory.to_remote_buffer(timeout=_CALL_LIMIT_S).serialize()

    def remote(self, own: Registration, description: bytes) -> RemoteBuffer:
        """Decodes a description of the peer; ``own`` is any memory registered here.

        The type of descriptions is that of the backend, which only its own ones tell.
        """
        with _failing("reading a description of memory"), self._lock:
            if self._buffer_type is None:
                self._buffer_type = type(own.memory.to_remote_buffer(timeout=_CALL_LIMIT_S))
            return self._buffer_type.deserialize(description)

    def read(
        self, into: Registration, size_bytes: int, remote: RemoteBuffer, limit_s: float
    ) -> Transfer:
        """Begins to read the start of the peer's memory into the start of registered memory.

        If it raises, the transfer may have begun nevertheless: the memory must not be used again.
        """
        with _failing("beginning a transfer"), self._lock:
            self._check_open()
            view = into.memory.to_mutable_view(0, size_bytes)
            work = self._transport.read(view, remote, async_op=True, timeout=limit_s)
            assert not isinstance(work, int)
            return Transfer(work)

    def close(self, limit_s: float) -> None:
        """Ends the transport, and its registrations. Blocks until ``limit_s`` at most.

        If transfers do not end in time, their memory is kept as long as the process lives.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            self._transport.close(timeout=limit_s)
        except Exception:
            _unclosed.append(self._transport)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportFailed("the transport has been closed")


def open_endpoint() -> Endpoint:
    """Returns a new end of a transport for host memory.

    Raises:
        TransportFailed: The backend cannot be used.
    """
    with _failing("making a transport"):
        return Endpoint(importlib.import_module(_MODULE).new_transport(_BACKEND, "cpu"))


def is_forced() -> bool:
    """Whether RDMA is to be tried without a device and within a host."""
    return knobs.RDMA.get() == "1"


def own_obstacle() -> str:
    """Returns why this process cannot use the channel; empty if a trial may tell.

    PyTorch's module is imported only where the setting and the devices suggest it.

    Raises:
        ConfigurationError: ``WEFT_RDMA`` has a value without meaning.
    """
    setting, variable = knobs.RDMA.get(), knobs.RDMA.variable
    if setting not in ("auto", "0", "1"):
        raise ConfigurationError(
            f"environment variable {variable} is {setting!r}; set it to auto, 0 or 1, or unset it"
        )
    if setting == "0":
        return f"{variable}=0 is set"
    if not is_forced() and not _has_device():
        return NO_DEVICE
    try:
        module = importlib.import_module(_MODULE)
        known = _BACKEND in module.available_transports()
    except (ImportError, AttributeError):
        return f"this PyTorch has no {_MODULE}, which comes with 2.15"
    if not known:
        return f"this PyTorch has no transport {_BACKEND!r}"
    if importlib.util.find_spec(_BACKEND) is None:
        return f"the package {_BACKEND} is not installed"
    return ""


def _has_device() -> bool:
    """Whether a port of some device is active, for instance ``4: ACTIVE``."""
    try:
        return any("ACTIVE" in port.read_text() for port in _DEVICES.glob("*/ports/*/state"))
    except OSError:
        return False


@contextlib.contextmanager
def _failing(action: str) -> Iterator[None]:
    """Raises the errors of a backend, which may be of any type, as TransportFailed."""
    try:
        yield
    except TransportFailed:
        raise
    except Exception as error:
        raise TransportFailed(f"{action} failed: {type(error).__name__}: {error}") from error


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


class Staged(Handle):
    """A copy of a buffer in a slab, kept until the peer has read it, or is lost."""

    __slots__ = ("_idle", "_slab")

    def __init__(self, slab: Slab, size_bytes: int, idle: deque[Slab]) -> None:
        content = SLAB.pack(slab.number, slab.size_bytes)
        if not slab.is_described:
            content += slab.description
        super().__init__(content, size_bytes, slab.memory[:size_bytes].data)
        self._slab = slab
        self._idle: deque[Slab] | None = idle

    def memory(self) -> memoryview:
        """Returns the copy. The slab is not used again: the peer may still be reading it."""
        self._idle = None
        return super().memory()

    def acknowledge(self) -> None:
        self._slab.is_described = True

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
        copier.copy(buffer, staged.kept)
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
