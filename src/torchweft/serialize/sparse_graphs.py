"""Makes sparse tensors of their parts, and takes them apart, differentiably to any order.

PyTorch's constructors of sparse tensors, and ``values()`` of compressed ones, lose terms of second
derivatives without an error. Both are linear, and each is the other's derivative. So here are two
functions for them whose derivatives are made of one another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchweft.errors import AutogradError

_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)


def indices_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors that say where the values of a sparse tensor are.

    Args:
        tensor: A coalesced tensor of coordinates, or a compressed tensor.
    """
    if tensor.layout is torch.sparse_coo:
        return (tensor.indices(),)
    if tensor.layout in _BY_COLUMN:
        return tensor.ccol_indices(), tensor.row_indices()
    return tensor.crow_indices(), tensor.col_indices()


def values_of(tensor: Tensor) -> Tensor:
    """Returns the values of a coalesced or compressed tensor, in its graph."""
    if not tensor.requires_grad:
        return tensor.values()
    apply: Any = _Values.apply
    values: Tensor = apply(tensor)
    return values


def with_values(tensor: Tensor, values: Tensor) -> Tensor:
    """Returns a tensor with the pattern of a coalesced or compressed one, in the graph of values.

    Args:
        tensor: The tensor, which may have the values already, but no graph.
        values: Its values.
    """
    if not values.requires_grad:
        return tensor
    apply: Any = _WithValues.apply
    made: Tensor = apply(values, tensor)
    return made


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.pattern = tensor.detach()
        return tensor.detach().values().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return with_values(_rebuilt(ctx.pattern, gradient.detach()), gradient)


class _WithValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, tensor: Tensor) -> Tensor:
        ctx.pattern = tensor.detach()
        return _rebuilt(tensor, values.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _values_at(ctx.pattern, gradients[0]), None


def _rebuilt(pattern: Tensor, values: Tensor) -> Tensor:
    """Returns a tensor with the pattern of another one, whose indices have been checked."""
    places: Any = indices_of(pattern)
    if pattern.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(
            places[0], values, pattern.shape, is_coalesced=True, check_invariants=False
        )
    compressed, plain = places
    return torch.sparse_compressed_tensor(
        compressed, plain, values, pattern.shape, layout=pattern.layout, check_invariants=False
    )


def _values_at(pattern: Tensor, gradient: Tensor) -> Tensor:
    """Returns what a gradient of any layout has at the values of ``pattern``, in its graph.

    Raises:
        AutogradError: The gradient has elements where the tensor has none. They have no place in
            the message to the sender.
    """
    if gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce()
    if gradient.layout is pattern.layout and _are_same(indices_of(gradient), indices_of(pattern)):
        return values_of(gradient)
    if gradient.layout is pattern.layout is torch.sparse_coo and not torch.is_grad_enabled():
        values = gradient.sparse_mask(pattern).values()  # without a dense tensor
        given = gradient.values()
    else:
        given = gradient if gradient.layout is torch.strided else gradient.to_dense()
        if pattern.layout is torch.sparse_coo:
            values = given[tuple(pattern.indices())]
        else:
            values = values_of(given.sparse_mask(pattern))
    if values.count_nonzero() != given.count_nonzero():
        raise AutogradError(
            f"the gradient of a sparse tensor of shape {tuple(pattern.shape)} that another worker "
            "computed has elements where the tensor has none, which would be lost on the way "
            "back; send the tensor as tensor.to_dense()"
        )
    return values


def _are_same(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return all(map(torch.equal, some, others))
