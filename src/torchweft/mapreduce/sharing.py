"""Finds the values that parts of a map share, on the caller's side.

A value is shared if several parts hold the same object, not an equal object. The search goes from
the outside in, so a list that all parts were given is one value, whatever it contains. Numbers,
strings and functions with a name are not worth sharing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.mapreduce import trees
from torchweft.mapreduce.shared import Slot
from torchweft.rpc import RRef
from torchweft.serialize.functions import name_of

Arguments = tuple[Any, Any]
"""The args and kwargs of a part."""

LIGHT_BYTES = 1 << 16
"""Arguments with no more bytes of tensors than this count as fast to send."""

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, type, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(RRef, Slot),
)
_FUNCTIONS = (FunctionType, BuiltinFunctionType)


class Common(NamedTuple):
    """The values that parts share, and the rest of their arguments.

    Attributes:
        values: The objects that several parts hold.
        arguments: Args and kwargs of each part, with a ``Slot`` in place of each shared object.
    """

    values: list[Any]
    arguments: list[Arguments]


def find_common(arguments: Sequence[Arguments], excluded: Container[int] = ()) -> Common:
    """Takes the objects that several parts hold out of the arguments of all parts.

    Args:
        arguments: Args and kwargs of each part.
        excluded: The ``id`` of each object that must stay in the arguments.
    """
    held: dict[int, tuple[Any, int]] = {}
    """By id, each object and the first part that holds it; a reference keeps the id in use."""
    common: dict[int, Slot] = {}
    values: list[Any] = []

    def is_common(part: int, node: Any) -> bool:
        key = id(node)
        if key in common:
            return True
        _, first = held.setdefault(key, (node, part))
        if first == part or key in excluded or not is_worth_it(node):
            return False
        common[key] = Slot(len(values))
        values.append(node)
        return True

    for part, each in enumerate(arguments):
        trees.flatten(each, partial(is_common, part))
    return Common(values, [_emptied(each, common) for each in arguments])


def _emptied(arguments: Arguments, common: dict[int, Slot]) -> Arguments:
    if not common:
        return arguments
    flat, spec = trees.flatten(arguments, lambda node: id(node) in common)
    args, kwargs = trees.unflatten([common.get(id(leaf), leaf) for leaf in flat], spec)
    return args, kwargs


def is_worth_it(tree: Any) -> bool:
    """Whether a tree contains a leaf that costs more to send than a number or a name."""
    return any(not _is_atom(leaf) for leaf in trees.leaves(tree))


def is_light(arguments: Arguments) -> bool:
    """Whether arguments are fast to send."""
    size = 0
    for leaf in trees.leaves(arguments):
        if isinstance(leaf, Tensor):
            size += leaf.nbytes
        elif not _is_atom(leaf):
            return False
    return size <= LIGHT_BYTES


def may_have_graph(result: Any) -> bool:
    """Whether gradients may lead into a result; True if that cannot be determined."""
    for leaf in trees.leaves(result):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                return True
        elif not _is_atom(leaf):
            return True
    return False


def _is_atom(leaf: Any) -> bool:
    if isinstance(leaf, _FUNCTIONS):
        return name_of(leaf, main_by_name=True) is not None
    return isinstance(leaf, _ATOMS)
