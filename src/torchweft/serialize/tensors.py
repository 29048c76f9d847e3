"""Converts tensors to a table and plain memory, and back without a copy.

``describe`` returns a small binary table and the memory that has to travel; the receiver's
``rebuild`` wraps the memory that arrived. Pickling a tensor the default way takes some hundred
microseconds. Contiguous tensors take a fast path of 2 us through each function.

Sending each tensor by itself would separate views that share memory: an assignment to one view
would no longer show in the other. Sending whole storages would ship a gigabyte for one row of an
embedding. So, storage by storage:

1. Tensors whose extents (first to last byte) overlap form a cluster.
2. A cluster travels as one buffer, the union of its extents, and its tensors as views onto it. If
   the union is mostly memory outside the tensors (two columns of a huge matrix), the tensors travel
   one by one, and equal views still as one.
3. A tensor by itself travels with its strides when it fills its extent (transposed,
   channels-last, expanded) or the extent is small, else as a contiguous copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from torchweft.errors import ProtocolError, SerializationError
from torchweft.serialize.table import (
    CODES,
    COMPUTED,
    ENTRY,
    HEADER,
    HOST,
    NO_BUFFER,
    NUMPY_DTYPES,
    PARAMETER,
    REAL_CODES,
    REQUIRES_GRAD,
    SHARED,
    SIMPLE,
    SIMPLE_NDIM,
    SIZES,
    SOME_ON_DEVICE,
    STRIDED,
    USUAL_ADDRESS,
    Entry,
    device_code,
    device_of,
    dtype_of,
    extent,
    flatten,
    header_flags,
    is_freed,
    is_worth_a_union,
    read,
    write,
)

_ALIGNMENT = 16  # the largest element, complex128: a view's offset stays a whole number


class _Span(NamedTuple):
    """The extent of one tensor in its storage, in bytes; and its entry in the table."""

    start: int
    end: int
    tensor: Tensor
    entry: Entry


def _place(tensors: Sequence[Tensor], entries: Sequence[Entry]) -> list[Tensor]:
    """Chooses the memory that travels for dense, detached tensors, and completes their entries.

    Returns:
        The buffers: flat contiguous tensors, on the device of the tensors in them, that share the
        tensors' memory where that is possible.
    """
    buffers: list[Tensor] = []
    for cluster in _clusters(tensors, entries):
        if len(cluster) == 1:
            _place_alone(cluster, buffers)
        elif is_worth_a_union(_length(cluster), [each.tensor for each in cluster]):
            _place_union(cluster, buffers)
        else:
            for equal in _equal_views(cluster):
                _place_alone(equal, buffers)
    return buffers


def _clusters(tensors: Sequence[Tensor], entries: Sequence[Entry]) -> Iterator[list[_Span]]:
    """Yields tensors that are not empty, together if their extents overlap."""
    storages: dict[tuple[torch.device, int], list[_Span]] = {}
    for tensor, entry in zip(tensors, entries, strict=True):
        if tensor.numel():
            start = int(tensor.storage_offset()) * tensor.itemsize
            end = start + int(extent(tensor.shape, tensor.stride())) * tensor.itemsize
            key = (tensor.device, tensor.untyped_storage().data_ptr())
            storages.setdefault(key, []).append(_Span(start, end, tensor, entry))
    for spans in storages.values():
        spans.sort(key=lambda span: span.start)
        cluster, end = [spans[0]], spans[0].end
        for span in spans[1:]:
            if span.start < end:
                cluster.append(span)
            else:
                yield cluster
                cluster = [span]
            end = max(end, span.end)
        yield cluster


def _length(cluster: list[_Span]) -> int:
    """Counts the bytes from the first to the last one of a cluster."""
    return int(max(span.end for span in cluster) - cluster[0].start)


def _place_union(cluster: list[_Span], buffers: list[Tensor]) -> None:
    start = cluster[0].start // _ALIGNMENT * _ALIGNMENT
    end = cluster[0].start + _length(cluster)
    first = cluster[0].tensor
    union = torch.empty(0, dtype=torch.uint8, device=first.device)
    union.set_(first.untyped_storage(), start, (end - start,), (1,))
    for span in cluster:
        span.entry.buffer, span.entry.strides = len(buffers), span.tensor.stride()
        span.entry.offset = (span.start - start) // span.tensor.itemsize
        span.entry.flags |= STRIDED | SHARED
    buffers.append(union)


def _place_alone(equal: list[_Span], buffers: list[Tensor]) -> None:
    """Gives one buffer to all tensors that are the same view of the same memory."""
    flat, strides = flatten(equal[0].tensor)
    is_shared = len(equal) > 1
    if is_shared and strides is None:
        strides = torch.empty(equal[0].tensor.shape, device="meta").stride()
    for span in equal:
        span.entry.buffer, span.entry.strides = len(buffers), strides
        if strides is not None:
            span.entry.flags |= STRIDED | SHARED if is_shared else STRIDED
    buffers.append(flat)


def _equal_views(cluster: list[_Span]) -> list[list[_Span]]:
    views: dict[object, list[_Span]] = {}
    for span in cluster:
        tensor = span.tensor
        key = (span.start, tensor.dtype, tensor.shape, tensor.stride())
        views.setdefault(key, []).append(span)
    return list(views.values())


# Describing and rebuilding


if TYPE_CHECKING:
    from typing_extensions import Buffer

    Memory = Buffer | Tensor
    Table = bytes | bytearray | memoryview

SMALLEST_BYTES = ENTRY.size
"""The minimum size of one tensor's entry in a table."""

NO_LIMIT = 1 << 32
_EMPTY = memoryview(bytearray())
_STRIDED_LAYOUT = torch.strided
_HOST = torch.device("cpu")
HOST_DEVICE = (0, 0)
"""The numbers of the CPU in the entry of a simple tensor."""


NO_MEMORY = (
    "a tensor has no memory that could be sent; within torch.func.grad, vmap, jvp and "
    "functionalize tensors stand for others: call these in the remote function, or, for gradients "
    "through calls, use torchweft.autograd.grad"
)


def describe(
    tensors: Sequence[Tensor], place: Callable[[torch.device], torch.device] | None = None
) -> tuple[bytes, list[Tensor]]:
    """Returns a table that describes tensors, and the memory that has to travel for them.

    Args:
        tensors: Dense tensors of any shape, strides and dtype; ``objects.pack`` has already taken
            apart other tensors (sparse, quantised, nested).
        place: Returns the device on which a tensor arrives, for its device here; None if that is
            the device of the same name.

    Returns:
        The table, and one-dimensional contiguous tensors, each on the device that the tensors in it
        are on. They share the memory of ``tensors`` wherever that is possible, so it may not change
        until they are sent.

    Raises:
        SerializationError: A tensor has no memory of its own that could be sent, or ``place``
            raised it.
    """
    if place is None or place(_HOST) == _HOST:
        try:
            described = _describe_simple(tensors, place)
        except RuntimeError as error:  # A tensor has no address.
            raise SerializationError(NO_MEMORY) from error
        if described is not None:
            return described
    sources = [as_dense(tensor) for tensor in tensors]
    entries = [
        _entry(tensor, source, place) for tensor, source in zip(tensors, sources, strict=True)
    ]
    buffers = _place(sources, entries)
    if place is not None:  # Only the host's memory becomes tensors of the receiver's CPU.
        on_host = {entry.buffer for entry in entries if entry.device[0] == HOST[0]}
        buffers = [each.cpu() if n in on_host else each for n, each in enumerate(buffers)]
    return write(entries, len(buffers)), buffers


def rebuild(
    table: Table,
    buffers: Sequence[Memory],
    *,
    detached: bool = False,
    worker: str = "",
    limit: int = NO_LIMIT,
) -> list[Tensor]:
    """Returns the tensors that a table describes, made of the memory that arrived.

    Tensors share the memory of ``buffers`` that is on their device, and keep it alive. Memory that
    is read-only or not aligned to the element size is copied instead; align it to 16 bytes.

    Args:
        table: The table that ``describe`` returned at the sender.
        buffers: The bytes of the sender's buffers, in order, each at least as long; flat tensors
            where they are on a device already.
        detached: Whether to drop ``requires_grad`` and ``Parameter``; see ``grad_flags``.
        worker: Name of this worker, for error messages.
        limit: How many tensors this worker accepts in one message.

    Raises:
        ProtocolError: The table is malformed, or reaches beyond the buffers.
        SerializationError: This worker lacks a device or dtype that is needed, or there are more
            tensors than the limit.
    """
    if len(buffers) > limit:
        raise too_many(len(buffers), limit, worker)
    simple = _rebuild_simple(table, buffers, detached)
    if simple is not None:
        return simple
    if len(table) >= HEADER.size and count_of(table) > limit:
        raise too_many(count_of(table), limit, worker)
    entries, buffer_count = read(table)
    if buffer_count != len(buffers):
        raise ProtocolError(
            f"the tensor table wants {buffer_count} buffers and {len(buffers)} came"
        )
    memory = _ReceivedMemory(buffers, worker)
    tensors = []
    for index, entry in enumerate(entries):
        tensor = memory.tensor(entry, index)
        tensors.append(tensor if detached else _with_flags(tensor, entry.flags))
    return tensors


def count_of(table: Table) -> int:
    """Returns the number of tensors that a non-empty table claims to describe.

    Raises:
        ProtocolError: The table is cut short.
    """
    if len(table) < HEADER.size:
        raise ProtocolError(f"a tensor table of {len(table)} bytes is shorter than its own head")
    count: int = HEADER.unpack_from(table)[0]
    return count


def too_many(count: int, limit: int, worker: str = "") -> SerializationError:
    """Returns the error for a message of more tensors than the limit.

    Args:
        count: How many tensors the message has.
        limit: How many tensors it may have.
        worker: Name of the receiving worker; empty at the sender.
    """
    who = f"worker {worker!r} accepts" if worker else "this worker sends"
    return SerializationError(
        f"a message has {count} tensors, and {who} at most {limit}; stack some of them, or "
        "send several messages",
        worker=worker,
    )


def devices_of(table: Table, worker: str = "") -> dict[int, torch.device | None]:
    """Returns the device on which each buffer of a table belongs; None for the CPU.

    Raises:
        ProtocolError: The table is malformed.
        SerializationError: This worker lacks a device.
    """
    entries, _ = read(table)
    return {
        entry.buffer: device_of(entry.device, index, worker)
        for index, entry in enumerate(entries)
        if entry.buffer != NO_BUFFER
    }


def grad_flags(table: Table) -> list[int]:
    """Returns the flags of each tensor, among them those that the autograd layer needs."""
    entries, _ = read(table)
    return [entry.flags for entry in entries]


def as_memory(tensor: Tensor) -> memoryview:
    """Returns the bytes of a buffer of ``describe`` without a copy; the view keeps it alive."""
    if not tensor.numel():
        return _EMPTY
    if tensor.dtype not in NUMPY_DTYPES:
        if tensor.stride(-1) != 1:  # a single element, cut out of a larger tensor
            tensor = tensor.as_strided((1,), (1,))
        tensor = tensor.view(torch.uint8)
    return tensor.numpy().data.cast("B")


def _is_simple(tensor: Tensor) -> bool:
    return (
        (type(tensor) is Tensor or type(tensor) is Parameter)
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is _STRIDED_LAYOUT
        and not tensor.is_nested
        and tensor.is_contiguous()
        # Neither empty, nor a lazy zero, nor freed.
        and (tensor.data_ptr() >= USUAL_ADDRESS or not (tensor.numel() == 0 or is_freed(tensor)))
        and tensor.data_ptr() != 0
        and not tensor.is_neg()
        and tensor.dim() <= SIMPLE_NDIM
    )


def _describe_simple(
    tensors: Sequence[Tensor], place: Callable[[torch.device], torch.device] | None
) -> tuple[bytes, list[Tensor]] | None:
    """Describes contiguous tensors on storages of their own; None for anything else.

    One inlined loop: this is most of the cost of a small call's tensors.
    """
    parts = [b""]
    buffers: list[Tensor] = []
    storages: set[int] = set()
    all_flags = on_device = 0
    kind, index = HOST_DEVICE
    count = len(tensors)
    for number, tensor in enumerate(tensors):
        code = REAL_CODES.get(tensor.dtype)
        if code is None or not _is_simple(tensor):
            return None
        if count > 1:
            storages.add(tensor.untyped_storage().data_ptr())
        shape = tensor.shape
        ndim = len(shape)
        flags = 0 if type(tensor) is Tensor else PARAMETER
        if tensor.requires_grad:
            flags |= REQUIRES_GRAD if tensor.is_leaf else REQUIRES_GRAD | COMPUTED
            all_flags |= flags
        if not tensor.is_cpu:
            device = tensor.device if place is None else place(tensor.device)
            kind, index = device_code(device)
            if kind == HOST[0]:
                return None
            on_device = SOME_ON_DEVICE
        elif on_device:
            kind, index = HOST_DEVICE
        parts.append(SIMPLE[ndim].pack(code, flags, ndim, kind, index, number, *shape))
        if flags:
            tensor = tensor.detach()
        buffers.append(tensor if ndim == 1 else tensor.view(-1))
    if count > 1 and len(storages) < count:
        return None
    of_header = all_flags and header_flags(all_flags)
    parts[0] = HEADER.pack(count, count, of_header | on_device)
    return b"".join(parts), buffers


def _rebuild_simple(table: Table, buffers: Sequence[Memory], detached: bool) -> list[Tensor] | None:
    """Rebuilds contiguous tensors; None leaves any other table to the general path."""
    position, end = HEADER.size, len(table)
    if end < HEADER.size or HEADER.unpack_from(table)[:2] != (len(buffers),) * 2:
        return None
    tensors: list[Tensor] = []
    for buffer in buffers:
        if position + ENTRY.size > end:
            return None
        code, flags, ndim, kind, index, number = ENTRY.unpack_from(table, position)
        position += ENTRY.size
        following = position + 8 * ndim
        if (
            flags & ~(REQUIRES_GRAD | PARAMETER | COMPUTED)
            or ndim > SIMPLE_NDIM
            or number != len(tensors)
            or following > end
        ):
            return None
        make = _on_device_memory if kind else _on_memory
        tensor = make(buffer, dtype_of(code), SIZES[ndim].unpack_from(table, position))
        if tensor is None or (kind and (kind, index) != device_code(tensor.device)):
            return None
        tensors.append(_with_flags(tensor, flags) if flags and not detached else tensor)
        position = following
    return tensors if position == end else None


def _on_memory(buffer: Memory, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
    if isinstance(buffer, Tensor):
        return None
    view, count = memoryview(buffer), prod(shape)
    if view.readonly or not 0 < count * dtype.itemsize <= view.nbytes:
        return None
    tensor = torch.frombuffer(view, dtype=dtype, count=count)
    if tensor.data_ptr() % dtype.itemsize:
        return None
    return tensor if len(shape) == 1 else tensor.view(shape)


def _on_device_memory(buffer: Memory, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
    """Makes a tensor of memory that is all its own, and on a device already."""
    if not isinstance(buffer, Tensor) or prod(shape) * dtype.itemsize != buffer.nbytes:
        return None
    tensor = buffer.view(dtype)
    return tensor if len(shape) == 1 else tensor.view(shape)


def _with_flags(tensor: Tensor, flags: int) -> Tensor:
    needs_grad = bool(flags & REQUIRES_GRAD)
    if needs_grad and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ProtocolError(f"the tensor table wants grad for a tensor of {tensor.dtype}")
    if flags & PARAMETER:
        return Parameter(tensor, requires_grad=needs_grad)
    return tensor.requires_grad_() if needs_grad else tensor


def as_dense(tensor: Tensor) -> Tensor:
    """Returns a detached tensor whose memory holds the values as the user sees them."""
    if tensor.dtype not in CODES or tensor.layout is not _STRIDED_LAYOUT or tensor.is_nested:
        raise SerializationError(
            f"a tensor of dtype {tensor.dtype} and layout {tensor.layout} has no plain memory; "
            "send it as an argument or a result, which takes it apart, or as its dense equivalent"
        )
    if tensor.is_meta:
        raise SerializationError("a tensor on the meta device has no memory that could be sent")
    tensor = tensor.detach()
    if type(tensor) is not Tensor:
        tensor = tensor.as_subclass(Tensor)
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if (tensor.is_cpu or tensor.is_cuda) and is_freed(tensor):
        raise SerializationError(
            f"the memory of a tensor of shape {tuple(tensor.shape)} has been freed: its storage "
            f"has {tensor.untyped_storage().nbytes()} bytes; send it before that is resized"
        )
    return tensor.resolve_conj().resolve_neg()


def _entry(
    tensor: Tensor, source: Tensor, place: Callable[[torch.device], torch.device] | None
) -> Entry:
    flags = 0
    if tensor.requires_grad:
        flags = REQUIRES_GRAD if tensor.is_leaf else REQUIRES_GRAD | COMPUTED
    if isinstance(tensor, Parameter):
        flags |= PARAMETER
    device = device_code(source.device if place is None else place(source.device))
    return Entry(CODES[source.dtype], flags, tuple(source.shape), NO_BUFFER, device)


# The receiver's memory. Every extent is checked against the buffer it lies in before torch makes a
# tensor there: versions of torch differ in the errors that they raise, or miss, about sizes.


class _ReceivedMemory:
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
        self._alone: set[int] = set()

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
        if not entry.flags & SHARED:
            # A tensor by itself may be copied: many with one buffer would multiply its memory.
            if entry.buffer in self._alone:
                raise ProtocolError(f"two tensors have buffer {entry.buffer} and do not share it")
            self._alone.add(entry.buffer)
        else:
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
        return torch.empty(0, dtype=torch.uint8, device="cpu")
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
        return torch.empty(entry.shape, dtype=dtype, device="cpu" if device is None else device)
    except RuntimeError as error:
        raise ProtocolError(f"no tensor can have shape {entry.shape}: {error}") from None
