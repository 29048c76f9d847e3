"""Distributed autograd with the interface of ``torch.autograd``: ``backward`` and ``grad``.

``torchweft.autograd.backward`` leaves gradients in the context. ``backward`` here also adds the
gradients of this worker's tensors to ``.grad``, so that a local optimizer can step them. Both
functions survive the loss of workers that ran parts of a map.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from torchweft.autograd import (
    backward_into_grad,
    context,
    current_context_id,
    get_gradients,
    is_available,
)
from torchweft.autograd import grad as gradients_of

__all__ = [
    "DistAutogradContext",
    "backward",
    "context",
    "current_context_id",
    "get_gradients",
    "grad",
    "is_available",
]

DistAutogradContext = context
"""The name that ``torchopt.distributed`` has for it."""
Gradient = Tensor | Sequence[Tensor | None] | None


def backward(
    context_id: int,
    tensors: Tensor | Iterable[Tensor],
    grad_tensors: Gradient | bool = None,
    retain_graph: bool | None = None,
    inputs: Tensor | Iterable[Tensor] | None = None,
    *,
    create_graph: bool = False,
) -> None:
    """Backpropagates through all workers, into ``.grad`` of this worker's tensors. Blocks.

    Works as ``torch.autograd.backward``. The gradients are in the context as well
    (``get_gradients``); gradients of other workers' tensors are in the context on those workers.

    If a worker is lost meanwhile, the parts of the context's maps run again on the remaining
    workers, and the pass is repeated. That requires that every answer to a call on which
    ``tensors`` depend be the result of a map, or that ``inputs`` is given. The graph of this
    worker is kept until the context ends for this purpose.

    Args:
        context_id: The context in which the tensors were computed.
        tensors: Tensors of this worker that require grad; scalars, if no gradient is given.
        grad_tensors: The gradient at each of ``tensors``. A bool in this position is taken for
            ``retain_graph``, which is third in ``torchopt.distributed``.
        retain_graph: Whether to keep the graphs for another pass; by default ``create_graph``.
        inputs: Leaves of this worker; if given, no other tensor gets a gradient, on this or
            another worker.
        create_graph: Whether the gradients have a graph.

    Raises:
        ArgumentTypeError: An argument is of the wrong type.
        AutogradError: An argument is invalid, or the pass failed; names the worker and the
            operation. ``.grad`` is unchanged.
    """
    grad_tensors, retain_graph = _in_order(grad_tensors, retain_graph)
    backward_into_grad(
        context_id,
        _listed(tensors),
        _listed(grad_tensors),
        retain_graph=bool(retain_graph),
        create_graph=create_graph,
        inputs=inputs,
    )


def grad(
    context_id: int,
    outputs: Tensor | Iterable[Tensor],
    inputs: Tensor | Iterable[Tensor],
    grad_outputs: Gradient | bool = None,
    retain_graph: bool | None = None,
    allow_unused: bool = False,
    *,
    create_graph: bool = False,
) -> tuple[Tensor, ...]:
    """Returns the gradients of tensors of this worker, through all workers. Blocks until done.

    Works as ``torchweft.autograd.grad``, with the order of arguments of ``torchopt.distributed``.
    If a worker is lost meanwhile, the parts of the context's maps run again on other workers, as
    in ``backward``. Nothing is accumulated anywhere, so a repeated call returns the same gradients.

    Args:
        context_id: The context in which the outputs were computed.
        outputs: Tensors of this worker.
        inputs: Tensors of this worker that the outputs depend on, leaves or not.
        grad_outputs: The gradient at each output. A bool in this position is taken for
            ``retain_graph``, which is fourth in ``torchopt.distributed``.
        retain_graph: Whether to keep the graphs for another pass; by default ``create_graph``.
        allow_unused: Whether the gradient of an input that no output depends on may be None.
        create_graph: Whether the gradients have a graph, through all workers.

    Returns:
        A gradient for each input.

    Raises:
        ArgumentTypeError: An argument is of the wrong type.
        AutogradError: An argument is invalid, an input was not used, or the pass failed.
    """
    if isinstance(grad_outputs, bool) and isinstance(retain_graph, bool):
        allow_unused, retain_graph = retain_graph, None
    grad_outputs, retain_graph = _in_order(grad_outputs, retain_graph)
    given = _listed(grad_outputs)
    return gradients_of(
        context_id,
        _listed(outputs),
        _listed(inputs),
        given,
        retain_graph,
        create_graph,
        allow_unused,
    )


def _in_order(
    gradients: Gradient | bool, retain_graph: bool | None
) -> tuple[Gradient, bool | None]:
    """Returns both arguments in our order; torchopt passes ``retain_graph`` in the first place."""
    return (None, gradients) if isinstance(gradients, bool) else (gradients, retain_graph)


def _listed(tensors: Any) -> Any:
    """Returns a single tensor as a list; everything else is checked where it is used."""
    return [tensors] if isinstance(tensors, Tensor) else tensors
