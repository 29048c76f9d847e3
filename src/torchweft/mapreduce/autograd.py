"""Distributed autograd with the interface of ``torch.autograd``: ``backward`` and ``grad``.

``torchweft.autograd.backward`` leaves gradients in the context. ``backward`` here also adds the
gradients of this worker's tensors to ``.grad``, so that a local optimizer can step them. Both
functions survive the loss of workers that ran parts of a map; see ``replay.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from torchweft.autograd import context, current_context_id, get_gradients, is_available
from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import Context as DistAutogradContext
from torchweft.autograd.contexts import Gradients, add_to_grad
from torchweft.autograd.engine import current_engine
from torchweft.autograd.graph import Roots, all_used, check_context_id, checked_inputs, roots_of
from torchweft.errors import AutogradError
from torchweft.mapreduce.replay import Replay

__all__ = [
    "DistAutogradContext",
    "backward",
    "context",
    "current_context_id",
    "get_gradients",
    "grad",
    "is_available",
]

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
    ``tensors`` depend is the result of a map, or that ``inputs`` is given. The graph of this
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
    check_context_id(context_id)
    wanted = None if inputs is None else _checked_leaves(inputs)
    roots = _roots_of(tensors, grad_tensors, "root")
    mode = _mode_of(retain_graph, create_graph)
    replay = Replay(current_engine(), context_id, roots)
    if wanted is not None:
        found = replay.gradients_of(wanted, mode._replace(for_inputs=True))
        gradients = _owned(zip(wanted, found, strict=True), roots, create_graph)
    else:
        gradients = replay.gradients_of_leaves(mode)
    with torch.set_grad_enabled(create_graph):
        current_engine().contexts.get(context_id).gradients.keep(gradients)
    # The context owns these gradients, and .grad is changed in place: it gets copies.
    add_to_grad(gradients.items(), gradients.values(), create_graph)


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

    Works as ``torchweft.autograd.grad``; but if a worker is lost meanwhile, the parts of the
    context's maps run again on other workers, as in ``backward``. Nothing is accumulated anywhere,
    so a repeated call returns the same gradients.

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
    check_context_id(context_id)
    wanted = checked_inputs(inputs)
    roots = _roots_of(outputs, grad_outputs, "output")
    mode = _mode_of(retain_graph, create_graph)
    replay = Replay(current_engine(), context_id, roots)
    found = replay.gradients_of(wanted, mode._replace(for_inputs=True))
    return all_used(found, allow_unused)


def _in_order(
    gradients: Gradient | bool, retain_graph: bool | None
) -> tuple[Gradient, bool | None]:
    """Returns both arguments in our order; torchopt passes ``retain_graph`` in the first place."""
    return (None, gradients) if isinstance(gradients, bool) else (gradients, retain_graph)


def _mode_of(retain_graph: bool | None, create_graph: bool) -> PassMode:
    retain_graph = create_graph if retain_graph is None else retain_graph
    return PassMode(bool(retain_graph), bool(create_graph))


def _roots_of(tensors: Tensor | Iterable[Tensor], gradients: Gradient, what: str) -> Roots:
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    gradients = [gradients] if isinstance(gradients, Tensor) else gradients
    return roots_of(tensors, gradients, what=what)


def _checked_leaves(inputs: Tensor | Iterable[Tensor]) -> list[Tensor]:
    checked = checked_inputs(inputs)
    for place, tensor in enumerate(checked):
        if not tensor.is_leaf:
            raise AutogradError(
                f"inputs[{place}], of shape {tuple(tensor.shape)}, is no leaf and has no .grad to "
                "add to; use torchweft.mapreduce.autograd.grad, which returns its gradient"
            )
    return list(dict.fromkeys(checked))


def _owned(
    found: Iterable[tuple[Tensor, Tensor | None]], roots: Roots, create_graph: bool
) -> Mapping[Tensor, Tensor]:
    """Returns the gradients that are not None, each in memory of its own.

    A found gradient may be shared by several tensors, be an argument of the program, or be an
    expanded scalar.
    """
    pairs = [(tensor, gradient) for tensor, gradient in found if gradient is not None]
    gradients = Gradients()
    with torch.set_grad_enabled(create_graph):
        gradients.add_all(pairs, borrowed=roots.gradients)
    return gradients.snapshot()
