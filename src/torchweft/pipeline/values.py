"""Values between stages: flattened to be sent, detached, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from torchweft.errors import ConfigurationError
from torchweft.pipeline.wiring import BATCH, Take, Wiring


class Packet(NamedTuple):
    """The values that one stage takes from another, as they are sent.

    Attributes:
        mask: Bit *i* says that leaf *i* needs a gradient.
        structure: The values with the places of leaves in their stead; None for one tensor alone.
        leaves: Tensors, detached, and other objects.
    """

    mask: int
    structure: Any
    leaves: Sequence[Any]

    def require_grad(self) -> list[Tensor]:
        """Returns the leaves that need a gradient, in order; from now on they require it."""
        mask, leaves = self.mask, self.leaves
        if not mask:
            return []
        return [leaf.requires_grad_() for place, leaf in enumerate(leaves) if mask >> place & 1]

    def values(self) -> Any:
        """Returns the values, one for each ``Take``."""
        if self.structure is None:
            return self.leaves
        return _pytree.tree_map(self.leaves.__getitem__, self.structure)


def pick(output: Any, take: Take, stage: int) -> Any:
    """Returns the part of a stage's output that another stage takes.

    Raises:
        ConfigurationError: The output has no such part.
    """
    if take.key is None:
        return output
    try:
        return output[take.key]
    except (KeyError, IndexError, TypeError):
        raise ConfigurationError(
            f"stage {stage} takes part {take.key!r} of the output of stage {take.source}, which is "
            f"{describe(output)}"
        ) from None


def picked_for(stage: int, wiring: Wiring, batch: Any) -> list[Any]:
    """Returns the values that a stage takes of a batch."""
    return [pick(batch, take, stage) for take in wiring.taken(stage, BATCH)]


def make_packet(values: Sequence[Any], *, may_need_grad: bool) -> tuple[Packet, list[Tensor]]:
    """Returns values as they are sent, and their tensors that need a gradient, not detached.

    Args:
        values: The values.
        may_need_grad: Whether a tensor without a graph counts as one that needs a gradient: the
            graph of a checkpointed stage is made later.
    """
    leaves: Sequence[Any]
    structure = None
    if len(values) == 1 and isinstance(values[0], Tensor):
        leaves = values
    else:
        leaves, spec = _pytree.tree_flatten(tuple(values))
        structure = _pytree.tree_unflatten(range(len(leaves)), spec)
    mask, sent, needing = 0, [], []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad or (may_need_grad and leaf.is_floating_point()):
                mask |= 1 << place
                needing.append(leaf)
            leaf = leaf.detach()
        sent.append(leaf)
    return Packet(mask, structure, sent), needing


def describe(value: Any) -> str:
    """Describes a value for a message: types and shapes."""
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return f"{name}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        inside = ", ".join(map(describe, value))
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {describe(each)}" for key, each in value.items()) + "}"
    return type(value).__name__


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


def unmarked(leaf: Any) -> Any:
    """Returns a leaf of a batch without its mark of ``broadcast``, if it has one."""
    return leaf.value if isinstance(leaf, _Whole) else leaf


def uncut(batch: Any) -> Any:
    """Returns a batch without marks of ``broadcast``."""
    leaves, structure = _pytree.tree_flatten(batch)
    if not any(isinstance(leaf, _Whole) for leaf in leaves):
        return batch
    return _pytree.tree_unflatten([*map(unmarked, leaves)], structure)


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
        else (unmarked(leaf),) * count
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
