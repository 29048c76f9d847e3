"""Makes tensors on the memory that arrived with a message.

Every extent is checked against the buffer it lies in before torch makes a tensor there: torch
versions differ in the errors that they raise, or miss, about impossible sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchweft.errors import ProtocolError
from torchweft.serialize.devices import device_of
from torchweft.serialize.dtypes import dtype_of
from torchweft.serialize.table import NO_BUFFER, SHARED, Entry

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Memory = Buffer | Tensor


class ReceivedMemory:
    """The buffers of one message, and the storages made of them so far.

    Args:
        buffers: Objects with the buffer protocol, or flat CPU tensors.
        worker: Name of this worker, for error messages.
    """

    def __init__(self, buffers: Sequence[Memory], worker: str) -> None:
        self._buffers = buffers
        self._worker = worker
        self._bytes: dict[int, Tensor] = {}
        self._shared: dict[tuple[int, torch.device | None], Tensor] = {}

    def tensor(self, entry: Entry, index: int) -> Tensor:
        """Makes the tensor ``index`` of the message, without grad."""
        dtype = dtype_of(entry.code)
        device = device_of(entry.device, index, self._worker)
        if entry.buffer == NO_BUFFER:
            return _checked_empty(entry, dtype, device)
        memory = self._memory(entry.buffer)
        needed = entry.end() * dtype.itemsize
        if needed > memory.numel():
            raise ProtocolError(
                f"tensor {index} of the message needs {needed} bytes of a buffer of "
                f"{memory.numel()} bytes"
            )
        if entry.flags & SHARED:
            return _view(self._on_device(entry.buffer, memory, device), entry, dtype)
        flat = _aligned(memory.narrow(0, 0, needed), dtype).view(dtype)
        if device is not None:
            flat = flat.to(device)
        if entry.strides is None:
            return flat.view(entry.shape)
        return flat.as_strided(entry.shape, entry.strides, flat.storage_offset() + entry.offset)

    def _memory(self, number: int) -> Tensor:
        memory = self._bytes.get(number)
        if memory is None:
            memory = self._bytes[number] = _as_bytes(self._buffers[number])
        return memory

    def _on_device(self, number: int, memory: Tensor, device: torch.device | None) -> Tensor:
        """Returns the storage that all views of one buffer share on ``device``."""
        key = (number, device)
        shared = self._shared.get(key)
        if shared is None:
            shared = _aligned(memory, torch.complex128)
            if device is not None:
                shared = shared.to(device)
            self._shared[key] = shared
        return shared


def _as_bytes(buffer: Memory) -> Tensor:
    """Returns a writable flat uint8 tensor on the memory, or on a copy of read-only memory."""
    if isinstance(buffer, Tensor):
        return buffer.detach().view(-1).view(torch.uint8)
    view = memoryview(buffer)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def _aligned(memory: Tensor, dtype: torch.dtype) -> Tensor:
    if memory.data_ptr() % dtype.itemsize or memory.storage_offset() % dtype.itemsize:
        return memory.clone()
    return memory


def _view(memory: Tensor, entry: Entry, dtype: torch.dtype) -> Tensor:
    assert entry.strides is not None
    size_bytes = memory.numel() // dtype.itemsize * dtype.itemsize
    flat = memory.narrow(0, 0, size_bytes).view(dtype)
    view = flat.as_strided(entry.shape, entry.strides, flat.storage_offset() + entry.offset)
    # Detached, so no view to autograd, but with the shared version counter: autograd notices if
    # another view was changed in place after this one was saved for a backward pass.
    return view.detach()


def _checked_empty(entry: Entry, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    try:
        return torch.empty(entry.shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise ProtocolError(f"no tensor can have shape {entry.shape}: {error}") from None
