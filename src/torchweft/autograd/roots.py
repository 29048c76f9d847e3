"""The start of a backward pass: tensors of the driver, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchweft.arguments import kind_of
from torchweft.errors import ArgumentTypeError, AutogradError


class Roots(NamedTuple):
    """The start of a pass.

    Attributes:
        edges: Places in the graph.
        gradients: The gradient at each of them.
        kept: Keeps the graph alive, since an edge to a Python node does not.
    """

    edges: tuple[GradientEdge, ...]
    gradients: tuple[Tensor, ...]
    kept: object = None


def roots_of(
    tensors: Iterable[Tensor],
    gradients: Sequence[Tensor | None] | None = None,
    *,
    what: str = "root",
) -> Roots:
    """Returns tensors and their gradients as roots.

    Args:
        tensors: The tensors, which must require grad.
        gradients: The gradient at each of them; None means one, for a scalar.
        what: The name of a tensor in error messages.

    Raises:
        ArgumentTypeError: An item of ``tensors`` or ``gradients`` is not a tensor.
        AutogradError: A tensor cannot be backpropagated from, or a gradient does not fit.
    """
    checked = _checked(tensors, what)
    given = _checked_gradients(checked, gradients, what)
    return Roots(tuple([get_gradient_edge(tensor) for tensor in checked]), given, checked)


def _checked(tensors: Iterable[Tensor], what: str) -> tuple[Tensor, ...]:
    try:
        checked = tuple(tensors)
    except TypeError as error:
        raise ArgumentTypeError(
            f"incompatible function arguments: the {what}s must be a list of tensors, "
            f"not {kind_of(tensors)}; for one loss pass [loss]"
        ) from error
    if not checked:
        raise AutogradError(
            f"No tensors provided for gradient computation; backward needs at least one {what}"
        )
    for place, tensor in enumerate(checked):
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(
                f"incompatible function arguments: {what} {place} is {kind_of(tensor)}, "
                "not a tensor"
            )
        if not tensor.requires_grad:
            raise AutogradError(
                f"{what} {place} does not require grad (requires_grad not set on it); was it made "
                "under torch.no_grad(), or of tensors that do not require grad?"
            )
    return checked


def _checked_gradients(
    tensors: Sequence[Tensor], gradients: Sequence[Tensor | None] | None, what: str
) -> tuple[Tensor, ...]:
    if gradients is None:
        gradients = [None] * len(tensors)
    try:
        gradients = list(gradients)
    except TypeError as error:
        raise ArgumentTypeError(
            f"the gradients for {what}s are a {type(gradients).__name__}; pass a list of tensors, "
            f"one for each {what}, or a tensor where there is one {what}"
        ) from error
    if len(gradients) != len(tensors):
        raise AutogradError(
            f"there are {len(gradients)} gradients for {len(tensors)} {what}s; give one for each, "
            "None where it is a scalar"
        )
    pairs = zip(tensors, gradients, strict=True)
    return tuple([_gradient(place, *pair, what) for place, pair in enumerate(pairs)])


def _gradient(place: int, tensor: Tensor, gradient: Tensor | None, what: str) -> Tensor:
    if gradient is None:
        if tensor.numel() != 1:
            raise AutogradError(
                f"{what} {place} has shape {tuple(tensor.shape)}; it is not a scalar, all {what}s "
                "need to be scalar: take a sum() or mean() first, or pass the gradient there"
            )
        return torch.ones_like(tensor)
    if not isinstance(gradient, Tensor):
        raise ArgumentTypeError(
            f"the gradient for {what} {place} is a {type(gradient).__name__}, not a tensor"
        )
    if gradient.shape != tensor.shape:
        raise AutogradError(
            f"the gradient for {what} {place} has shape {tuple(gradient.shape)}; the {what} has "
            f"{tuple(tensor.shape)}"
        )
    if gradient.is_complex() != tensor.is_complex():
        raise AutogradError(
            f"the gradient for {what} {place} is {gradient.dtype}; the {what} is {tensor.dtype}"
        )
    return gradient
