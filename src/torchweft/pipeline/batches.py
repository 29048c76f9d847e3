"""Batches and targets: cut into micro-batches, joined again, and checked.

No gradient goes back to the driver, so a tensor that requires grad is refused. And whether a
tensor with as many rows as the batch has one for each sample cannot be seen. But a mask or a table
is usually the same object in each step, while the samples change.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from torchweft.errors import ConfigurationError
from torchweft.pipeline.wiring import describe


class _Whole:
    """Marks a value of a batch that is not cut."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"broadcast({describe(self.value)})"


def broadcast(value: Any) -> Any:
    """Marks a value in a batch or target that each micro-batch gets whole.

    A tensor that is not per sample, such as a mask or weights of classes, needs the mark: all other
    tensors are cut along dimension 0, also one that has as many rows as the batch by chance. A step
    warns once if such a tensor is the same in two steps. Stages must not change it in place.

    Args:
        value: A tensor, or a tuple, list or dict of tensors.

    Returns:
        The mark, to be passed in place of ``value``. Stages and the loss function see ``value``.
    """
    return _Whole(value)


def _unmarked(leaf: Any) -> Any:
    """Returns a leaf of a batch without its mark of ``broadcast``, if it has one."""
    return leaf.value if isinstance(leaf, _Whole) else leaf


def uncut(batch: Any) -> Any:
    """Returns a batch without marks of ``broadcast``."""
    leaves, structure = _pytree.tree_flatten(batch)
    if not any(isinstance(leaf, _Whole) for leaf in leaves):
        return batch
    return _pytree.tree_unflatten([*map(_unmarked, leaves)], structure)


def cut_batch(batch: Any, count: int, name: str = "the batch") -> list[Any]:
    """Cuts each tensor of a batch into ``count`` equal parts along dimension 0.

    Objects that are no tensors, tensors without dimensions, and values that are marked by
    ``broadcast`` go to all parts.

    Raises:
        ConfigurationError: A tensor cannot be cut evenly, or two tensors differ in size.
    """
    leaves, structure = _pytree.tree_flatten(batch)
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"the tensors of {name} have {sorted(sizes)} rows; all need the same number. Mark one "
            "that is not per sample: torchweft.pipeline.broadcast(tensor)"
        )
    for size in sizes:
        if size % count or not size:
            raise ConfigurationError(
                f"{name} has {size} rows, which cannot be cut into {count} equal micro-batches; "
                f"pass a multiple of {count} rows, or choose another number of micro-batches"
            )
    columns = [
        torch.tensor_split(leaf, count)
        if isinstance(leaf, Tensor) and leaf.dim()
        else (_unmarked(leaf),) * count
        for leaf in leaves
    ]
    return [
        _pytree.tree_unflatten([column[number] for column in columns], structure)
        for number in range(count)
    ]


def joined(outputs: Sequence[Any]) -> Any:
    """Returns the outputs of all micro-batches as one, joined along dimension 0."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs))
    if isinstance(first, dict):
        return {key: joined([each[key] for each in outputs]) for key in first}
    if isinstance(first, (tuple, list)):
        columns = [joined(column) for column in zip(*outputs, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    return list(outputs)


# Checks


def check_untrained(batch: Any, name: str) -> None:
    """Looks at one batch or target.

    Args:
        batch: The batch.
        name: What it is, in messages.

    Raises:
        ConfigurationError: A tensor requires grad, or belongs to a module.
    """
    for path, leaf in _pytree.tree_flatten_with_path(batch)[0]:
        value = _unmarked(leaf)
        if isinstance(value, Tensor) and value.requires_grad:
            raise ConfigurationError(
                f"{name}{_pytree.keystr(path)} requires grad, and no gradient comes back from the "
                "stages: pass tensor.detach(), or make what computes it a part of the first stage"
            )
        if isinstance(leaf, nn.Buffer):
            raise ConfigurationError(
                f"{name}{_pytree.keystr(path)} is a buffer of a module: make the module a part of "
                "the stage that uses it, or pass torchweft.pipeline.broadcast(buffer)"
            )


class TrainingBatches:
    """The batches of a pipeline, or its targets, one after the other.

    Args:
        name: What they are, in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._earlier: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self._has_warned = False

    def warn_of_same(self, batch: Any) -> None:
        """Warns once of a tensor that was the same in the step before, beside one that was not."""
        if self._has_warned:
            return
        tensors = {
            _pytree.keystr(path): leaf
            for path, leaf in _pytree.tree_flatten_with_path(batch)[0]
            if isinstance(leaf, Tensor) and leaf.dim()
        }
        earlier = self._earlier
        self._earlier = {path: (weakref.ref(each), each._version) for path, each in tensors.items()}
        same = [path for path, each in tensors.items() if _is_same(earlier.get(path), each)]
        if not same or len(same) == len(tensors) or earlier.keys() != tensors.keys():
            return
        self._has_warned = True
        path = same[0]
        warnings.warn(
            f"{self._name}{path}, {describe(tensors[path])}, is the same tensor as in the step "
            "before, and was cut into micro-batches like the others. If its rows are not those of "
            "samples, mark it: torchweft.pipeline.broadcast(tensor). If they are, pass a copy",
            RuntimeWarning,
            stacklevel=3,  # Outside of Pipe.step.
        )


def _is_same(earlier: tuple[weakref.ref[Tensor], int] | None, tensor: Tensor) -> bool:
    if earlier is None:
        return False
    known, version = earlier
    return known() is tensor and version == tensor._version
