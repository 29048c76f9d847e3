"""The calls of CUDA that share device memory between processes.

torch's own handles (``UntypedStorage._share_cuda_``) keep a counter in a file for each tensor that
is sent, and change the tensor's storage. So this module asks the driver itself, for whole
allocations: a handle is made once, a mapping is opened once, and tensors are ranges of it.

An address says nothing about identity: an allocation may be freed and another one begin at the same
place. The driver's buffer id never comes again within a process, and names the allocation here.

Everything else is torch's: memory of the caching allocator, streams, events and copies.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.errors import WeftError

HANDLE_BYTES = 64

_BUFFER_ID, _DEVICE, _RANGE_START, _RANGE_BYTES = 7, 9, 11, 12
_LAZY_PEER_ACCESS = 1
_INVALID_VALUE, _INVALID_CONTEXT = 1, 201
_Event: Any = torch.cuda.Event
_Stream: Any = torch.cuda.Stream


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
        return _Event(interprocess=True)

    def handle_of(self, event: Any) -> bytes:
        """Returns the handle by which another process opens an event."""
        return bytes(event.ipc_handle())

    def open_event(self, handle: bytes, device: int) -> Any:
        """Opens an event of another process.

        Raises:
            RuntimeError: It cannot be opened, or the other process has ended.
        """
        return _Event.from_ipc_handle(torch.device("cuda", device), handle)

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
                        ends[device] = _Event()
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
            stream = self._copy_streams[device] = _Stream(device)
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
