"""One-sided reads of another host's memory, by ``torch.distributed._transport``.

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
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchweft import knobs
from torchweft.errors import ConfigurationError, WeftError

NO_DEVICE = "there is no RDMA device with an active port here"
"""The obstacle of most hosts."""

_BACKEND = "nixl"
_MODULE = "torch.distributed._transport"
_DEVICES = Path("/sys/class/infiniband")
_CALL_LIMIT_S = 10.0
"""Seconds that a call may wait for another one of the same transport."""


class TransportFailed(WeftError, OSError):
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
