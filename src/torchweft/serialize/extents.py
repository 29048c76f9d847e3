"""Chooses the bytes of memory that travel for the tensors of one message.

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

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from torchweft.serialize.table import NO_BUFFER, extent

UNION_FLOOR_BYTES = 4096
"""A union or extent up to this size is sent whole, whatever part of it the tensors use."""

_UNION_FACTOR = 2
_ALIGNMENT = 16  # the largest element, complex128: a view's offset stays a whole number


class Placement:
    """Where one tensor lies in the buffers: offset and strides count elements."""

    __slots__ = ("buffer", "offset", "shared", "strides")

    def __init__(
        self,
        buffer: int,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        shared: bool = False,
    ) -> None:
        self.buffer = buffer
        self.strides = strides
        self.offset = offset
        self.shared = shared


class _Span:
    """The extent of one tensor in its storage, in bytes."""

    __slots__ = ("end", "index", "start", "tensor")

    def __init__(self, index: int, tensor: Tensor) -> None:
        item_bytes = tensor.element_size()
        self.index = index
        self.tensor = tensor
        self.start = tensor.storage_offset() * item_bytes
        self.end = self.start + extent(tensor.shape, tensor.stride()) * item_bytes


USUAL_ADDRESS = 1 << 40
"""Few tensors begin below it; those of a storage that the program has freed do."""


def is_freed(tensor: Tensor) -> bool:
    """Whether the storage of a dense tensor has been made too small for it."""
    if not tensor.numel():
        return False
    end = tensor.storage_offset() + extent(tensor.shape, tensor.stride())
    return bool(tensor.untyped_storage().nbytes() < end * tensor.element_size())


def place(tensors: Sequence[Tensor]) -> tuple[list[Placement], list[Tensor]]:
    """Chooses the memory that travels for dense, detached ``tensors``.

    Returns:
        A placement for each tensor, and the buffers: flat contiguous tensors, on the device of
        the tensors in them, that share the tensors' memory where that is possible.
    """
    placements = [Placement(NO_BUFFER)] * len(tensors)
    buffers: list[Tensor] = []
    for cluster in _clusters(tensors):
        if len(cluster) == 1:
            _place_alone(cluster, placements, buffers)
        elif is_worth_a_union(_length(cluster), [each.tensor for each in cluster]):
            _place_union(cluster, placements, buffers)
        else:
            for equal in _equal_views(cluster):
                _place_alone(equal, placements, buffers)
    return placements, buffers


def _clusters(tensors: Sequence[Tensor]) -> Iterator[list[_Span]]:
    storages: dict[tuple[torch.device, int], list[_Span]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            key = (tensor.device, tensor.untyped_storage().data_ptr())
            storages.setdefault(key, []).append(_Span(index, tensor))
    for spans in storages.values():
        if len(spans) == 1:
            yield spans
        else:
            yield from _merge(spans)


def _length(cluster: list[_Span]) -> int:
    """Counts the bytes from the first to the last one of a cluster."""
    return int(max(span.end for span in cluster) - cluster[0].start)


def _merge(spans: list[_Span]) -> Iterator[list[_Span]]:
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


def is_worth_a_union(union_bytes: int, tensors: Sequence[Tensor]) -> bool:
    """Whether the memory from the first to the last byte of tensors should travel whole."""
    if union_bytes <= UNION_FLOOR_BYTES:
        return True
    wanted_bytes = sum(_distinct(tensor) * tensor.element_size() for tensor in tensors)
    return bool(union_bytes <= _UNION_FACTOR * wanted_bytes)


def _place_union(cluster: list[_Span], placements: list[Placement], buffers: list[Tensor]) -> None:
    start = cluster[0].start // _ALIGNMENT * _ALIGNMENT
    end = cluster[0].start + _length(cluster)
    first = cluster[0].tensor
    union = torch.empty(0, dtype=torch.uint8, device=first.device)
    union.set_(first.untyped_storage(), start, (end - start,), (1,))
    for span in cluster:
        offset = int((span.start - start) // span.tensor.element_size())
        strides = span.tensor.stride()
        placements[span.index] = Placement(len(buffers), strides, offset, shared=True)
    buffers.append(union)


def _place_alone(equal: list[_Span], placements: list[Placement], buffers: list[Tensor]) -> None:
    """Gives one buffer to all tensors that are the same view of the same memory."""
    flat, strides = flatten(equal[0].tensor)
    shared = len(equal) > 1
    if shared and strides is None:
        strides = torch.empty(equal[0].tensor.shape, device="meta").stride()
    for span in equal:
        placements[span.index] = Placement(len(buffers), strides, shared=shared)
    buffers.append(flat)


def _equal_views(cluster: list[_Span]) -> list[list[_Span]]:
    views: dict[object, list[_Span]] = {}
    for span in cluster:
        tensor = span.tensor
        key = (span.start, tensor.dtype, tensor.shape, tensor.stride())
        views.setdefault(key, []).append(span)
    return list(views.values())


def flatten(tensor: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """Returns the elements that travel, and strides unless they are the contiguous ones."""
    if tensor.is_contiguous():
        return tensor.view(-1), None
    strides = tensor.stride()
    length = extent(tensor.shape, strides)
    is_small = length * tensor.element_size() <= UNION_FLOOR_BYTES
    if is_small or length <= _distinct(tensor):
        return tensor.as_strided((length,), (1,)), strides
    if tensor.element_size() == 1:
        tensor = tensor.view(torch.uint8)  # torch cannot copy every one-byte dtype
    # Dimensions that were expanded hold one element each, in the copy too.
    for dimension, stride in enumerate(strides):
        if stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    copy = tensor.contiguous()
    if 0 not in strides:
        return copy.view(-1), None
    pairs = zip(copy.stride(), strides, strict=True)
    return copy.view(-1), tuple(stride if before else 0 for stride, before in pairs)


def separated(tensor: Tensor) -> Tensor:
    """Returns a copy of a dense tensor without a graph, which takes no more than its memory.

    A copy by torch takes as much as the shape announces: an expanded tensor has one element in
    memory for many.
    """
    strides = tensor.stride()
    length = extent(tensor.shape, strides) if tensor.numel() else 0
    if length >= tensor.numel():
        return tensor.clone()
    memory = tensor.as_strided((length,), (1,)).clone()
    return memory.as_strided(tensor.shape, strides).detach()  # No view to autograd.


def _distinct(tensor: Tensor) -> int:
    """Counts the elements of ``tensor`` that can lie at distinct addresses."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in pairs if stride)
