"""Joins the arguments of several calls, and splits the result of the joined call.

The *kind* of a call is the structure of its arguments with the dtype, device and shape of each
tensor. Calls of one kind can be stacked. See ``docs/protocols/batching.md`` for the rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.errors import BatchError

_TENSOR, _OTHER = "tensor", "other"


class Parts(NamedTuple):
    """A nested value taken apart.

    Attributes:
        structure: The containers, equal for values of equal structure.
        leaves: Tensors, and values that are neither tensors nor containers, in order.
    """

    structure: Hashable
    leaves: Sequence[Any]


def take_apart(value: Any) -> Parts:
    """Takes nested tuples, lists and dicts apart; the leaves of a dict are in order of its keys."""
    if type(value) is tuple:
        # The arguments of most calls: a few tensors, or one.
        for each in value:
            if type(each) is not Tensor:
                break
        else:
            return Parts(tensors_alone(len(value)), value)
    leaves: list[Any] = []
    return Parts(_structure(value, leaves), leaves)


@functools.cache
def tensors_alone(count: int) -> Hashable:
    """Returns the structure of a tuple of tensors."""
    return tuple, (_TENSOR,) * count


def _structure(value: Any, leaves: list[Any]) -> Hashable:
    if isinstance(value, Tensor):
        leaves.append(value)
        return _TENSOR
    if isinstance(value, (tuple, list)):
        return type(value), tuple([_structure(each, leaves) for each in value])
    if isinstance(value, dict):
        keys = Keys(value)
        return type(value), keys, tuple([_structure(value[key], leaves) for key in keys.ordered])
    leaves.append(value)
    return _OTHER


class Keys:
    """The keys of a dict; equal for dicts with the same keys, in whatever order they have them."""

    __slots__ = ("given", "ordered")

    def __init__(self, keys: Iterable[Any]) -> None:
        self.given = tuple(keys)
        try:
            self.ordered = tuple(sorted(self.given))
        except TypeError:
            self.ordered = tuple(sorted(self.given, key=lambda key: (str(type(key)), repr(key))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and self.ordered == other.ordered

    def __hash__(self) -> int:
        return hash(self.ordered)

    def joined(self, kind: Callable[[Any], Any], values: Iterable[Any]) -> Any:
        """Returns a dict of values that are in order, with its keys as they were given."""
        pairs = dict(zip(self.ordered, values, strict=True))
        return kind((key, pairs[key]) for key in self.given)


def put_together(structure: Any, leaves: Sequence[Any]) -> Any:
    """Returns a value of a structure with other leaves."""
    if structure is _TENSOR and len(leaves) == 1:
        return leaves[0]
    return _put_together(structure, iter(leaves))


def _put_together(structure: Any, leaves: Any) -> Any:
    if isinstance(structure, str):
        return next(leaves)
    kind = structure[0]
    values = [_put_together(each, leaves) for each in structure[-1]]
    if len(structure) == 3:
        return structure[1].joined(kind, values)
    if hasattr(kind, "_make"):  # a named tuple
        return kind._make(values)
    return kind(values)


def kind_of(parts: Parts, is_padded: bool) -> Hashable:
    """Returns the kind of a call; with padding, the number of dimensions replaces the shape."""
    described: list[Any] = [parts.structure]
    for leaf in parts.leaves:
        if isinstance(leaf, Tensor):
            described += (leaf.dtype, leaf.device, leaf.ndim if is_padded else leaf.shape)
    return tuple(described)


def are_alike(calls: Sequence[Parts]) -> bool:
    """Returns whether all calls are of one kind. Hot path: does not look at the kinds."""
    structure, leaves = calls[0]
    if len(leaves) != 1 or not isinstance(leaves[0], Tensor):
        first = kind_of(calls[0], False)
        return all(kind_of(call, False) == first for call in calls)
    dtype, device, shape = leaves[0].dtype, leaves[0].device, leaves[0].shape
    for other, own in calls:
        if other is not structure and other != structure:
            return False
        leaf = own[0]
        if leaf.shape != shape or leaf.dtype is not dtype or leaf.device != device:
            return False
    return True


def shapes_of(parts: Parts) -> str:
    """Returns the dtypes and shapes of the tensors of a call, for messages."""
    tensors = [each for each in parts.leaves if isinstance(each, Tensor)]
    named = [f"{str(each.dtype)[6:]}{list(each.shape)}" for each in tensors]
    others = len(parts.leaves) - len(tensors)
    return ", ".join([*named, *([f"{others} other"] if others else [])]) or "nothing"


def stack(columns: Sequence[Sequence[Any]], pad: float | None) -> list[Any]:
    """Joins the leaves of calls of one kind.

    Args:
        columns: For each leaf, its values in all calls.
        pad: The value that fills smaller tensors up, or None.

    Returns:
        For each leaf, a tensor with a new first dimension, or a list. A stacked tensor is a leaf
        that requires grad if any of its tensors requires grad; nothing leads from it to these.
    """
    return [_stacked(column, pad) if isinstance(column[0], Tensor) else list(column)
            for column in columns]  # fmt: skip


def _stacked(tensors: Sequence[Tensor], pad: float | None) -> Tensor:
    requires_grad = False
    for tensor in tensors:
        if tensor.requires_grad:
            requires_grad = True
            tensors = [each.detach() for each in tensors]
            break
    if pad is not None and any(each.shape != tensors[0].shape for each in tensors):
        joined = _padded(tensors, pad)
    else:
        joined = torch.stack(list(tensors))
    return joined.requires_grad_() if requires_grad else joined


def _padded(tensors: Sequence[Tensor], pad: float) -> Tensor:
    sizes = [max(size) for size in zip(*[each.shape for each in tensors], strict=True)]
    joined = tensors[0].new_full((len(tensors), *sizes), pad)
    for row, tensor in zip(joined, tensors, strict=True):
        row[region(tensor.shape)].copy_(tensor)
    return joined


def region(shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns the index of the part of a padded row that a tensor of a shape fills."""
    return tuple([slice(size) for size in shape])


def check_rows(
    result: Parts, count: int, function: str, callers_of: Callable[[], Sequence[str]]
) -> None:
    """Raises BatchError unless each tensor of a result has a row for each call."""
    for leaf in result.leaves:
        if isinstance(leaf, Tensor) and (not leaf.ndim or leaf.shape[0] != count):
            callers = callers_of()
            raise BatchError(
                f"{function} was given a batch of {count} calls and returned a tensor of shape "
                f"{list(leaf.shape)}; the first dimension of each tensor that it returns must be "
                f"{count}, a row for each call. The calls are those of {named(callers)}",
                call=function,
                callers=tuple(callers),
                shapes=tuple([shapes_of(result)] * len(callers)),
            )


def detached(result: Parts) -> Parts:
    """Returns a result without its graph."""
    leaves = [each.detach() if isinstance(each, Tensor) else each for each in result.leaves]
    return Parts(result.structure, leaves)


def rows_of(result: Parts, count: int) -> list[Any]:
    """Splits a checked result into those of the calls."""
    structure, leaves = result
    if structure is _TENSOR:
        return list(leaves[0].unbind())
    columns = [each.unbind() if isinstance(each, Tensor) else [each] * count for each in leaves]
    if not columns:
        return [put_together(structure, ()) for _ in range(count)]
    return [put_together(structure, row) for row in zip(*columns, strict=True)]


def majority(kinds: Sequence[Hashable], former: Hashable) -> Hashable:
    """Returns the most frequent kind; in a tie, the former batch's, or else the first."""
    first = kinds[0]
    if all(each == first for each in kinds):
        return first
    counts: dict[Hashable, int] = {}
    for each in kinds:
        counts[each] = counts.get(each, 0) + 1
    most = max(counts.values())
    tied = [each for each, number in counts.items() if number == most]
    return former if former in tied else tied[0]


def differs(function: str, caller: str, own: Parts, others: Parts) -> BatchError:
    """Returns the error of a call that differs from most of its batch."""
    own_shapes, other_shapes = shapes_of(own), shapes_of(others)
    how = "in the structure of its arguments" if own.structure != others.structure else ""
    return BatchError(
        f"the call of {function} by worker {caller!r} cannot be stacked with the others of its "
        f"batch{' as it differs ' + how if how else ''}: it has {own_shapes}, the others have "
        f"{other_shapes}. Send arguments of one shape, or see pad= and mixed= of batched",
        call=function,
        callers=(caller,),
        shapes=(own_shapes,),
    )


_NAMED_LIMIT = 8


def named(callers: Sequence[str]) -> str:
    """Returns the distinct callers of a batch, for messages."""
    distinct = list(dict.fromkeys(callers))
    more = len(distinct) - _NAMED_LIMIT
    text = ", ".join(map(repr, distinct[:_NAMED_LIMIT]))
    return f"{text} and {more} more" if more > 0 else text
