"""The nodes of a worker's graph that stand for messages, and the records of these messages.

A message that carries tensors which require grad leaves a send record at its sender and a receive
record at its receiver, under one message id. A gate leads to each sent tensor in the sender's
graph; a placeholder stands for each received tensor in the receiver's graph.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils._python_dispatch import _disable_current_modes

# Placeholders: the tensors that stand for received tensors in the receiver's graph. They must not
# be leaves, since programs modify received tensors in place. And a walk must see where the graph
# continues on another worker. Both follow from making each placeholder the output of a node. torch
# has a suitable node that raises when it is run. Making it takes less than half the time of a
# Python function, which is the fallback.
#
# Each tensor has a node of its own. The engine calls the hooks of all outputs of a node that it
# runs, with None for missing gradients, so the tensors of a message must not share a node.

RAN_INTO = (
    "backward reached a tensor that came from another worker; inside the autograd context call "
    "torchweft.autograd.backward(context_id, [loss]), which goes on there, instead of "
    "loss.backward()"
)

OF_ANOTHER_CONTEXT = (
    "backward reached a tensor that another worker computed in another autograd context, such as a "
    "state kept from an earlier step; gradients do not go from context to context: detach() such "
    "tensors, or make all calls that a loss depends on in one context"
)

_EMPTY = torch.empty(0)


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        # Detached, not a view: a view that a function returns cannot be modified in place.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        raise RuntimeError(RAN_INTO)


def _by_function(leaf: Tensor) -> Tensor:
    apply: Any = _Received.apply
    output: Tensor = apply(leaf)
    return output


def _by_torch(leaf: Tensor) -> Tensor:
    output: Tensor = _delayed_error(RAN_INTO, 1)(leaf)
    return output


_delayed_error: Any = getattr(torch._C._functions, "DelayedError", None)
_output: Callable[[Tensor], Tensor] = _by_function if _delayed_error is None else _by_torch

PLACEHOLDER = type(_output(torch.empty(0, requires_grad=True)).grad_fn)
"""The type of placeholder nodes."""


def make_placeholders(tensors: Sequence[Tensor]) -> tuple[list[Node], list[Tensor]]:
    """Makes tensors with the memory of ``tensors``, each the output of a new node.

    Args:
        tensors: Fresh leaves of a differentiable type; their memory moves to the placeholders,
            and the caller must drop them.

    Returns:
        The nodes and the placeholders, in the order of ``tensors``.
    """
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return make_placeholders(tensors)
    nodes: list[Any] = []
    placeholders: list[Tensor] = []
    for tensor in tensors:
        placeholder: Any = _output(tensor.requires_grad_(True))
        node = placeholder.grad_fn
        # As torch does for the first hook of a tensor. A run of the engine in another thread may
        # look at the node's tables of hooks, so none may be added once the graph can be run.
        hooks = placeholder._backward_hooks = OrderedDict()
        node._register_hook_dict(placeholder)
        node.metadata[_HOOKS] = hooks
        nodes.append(node)
        placeholders.append(placeholder)
        _drop_memory(tensor)
    return nodes, placeholders


_HOOKS = "torchweft hooks"
"""Key in the metadata of a placeholder."""


def hooks_at(placeholder: Any) -> dict[Any, Callable[[Tensor | None], object]]:
    """Returns the table of the hooks of a placeholder's tensor, in the order of their calls."""
    table: dict[Any, Callable[[Tensor | None], object]] = placeholder.metadata[_HOOKS]
    return table


def is_without_memory(leaf: object) -> bool:
    """Returns whether a leaf may be a placeholder's, of any context; few other leaves match."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.numel()


def _drop_memory(leaf: Tensor) -> None:
    # The node keeps its leaf as long as the graph lives; the memory can be freed now.
    if leaf.layout is torch.strided:
        leaf.data = _EMPTY if leaf.is_cpu else leaf.new_empty(0)


# Gates: the nodes of aliases of the sent tensors. A run of torch's engine can wait in a gate; see
# ``local_engine``.


class _Alias(torch.autograd.Function):
    """Makes a gate for a tensor of any type and layout."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        take: Callable[[], Tensor | None] | None = getattr(gradient, TAKE, None)
        return gradient if take is None else take()


TAKE = "_weft_take"
"""Name of an attribute of the zeros at a gate of a function."""


_count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_STRIDED = torch.strided
_view_of = torch.ops.aten.alias.default


def gates_of(tensors: Iterable[Tensor]) -> tuple[Node, ...]:
    """Returns a gate for each of ``tensors``, which require grad; it keeps the graph alive."""
    if not _is_grad_enabled() or _count_modes():
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            return gates_of(tensors)
    gates: list[Any] = []
    for tensor in tensors:  # Without a function for a list: it runs for each recorded message.
        if type(tensor) in _PLAIN and tensor.layout is _STRIDED:
            # Not ``tensor[...]``: it keeps the interpreter lock while it waits for a lock of the
            # tensor, and a thread in another operation may hold that one and wait for the former.
            gates.append(_view_of(tensor).grad_fn)
        else:
            gates.append(_alias_of(tensor).grad_fn)
    return tuple(gates)


_alias_of: Callable[[Tensor], Tensor] = _Alias.apply


_new_edge: Any = functools.partial(tuple.__new__, GradientEdge)
_REST = tuple(GradientEdge._field_defaults.values())


def edges_behind(gates: Iterable[Node]) -> tuple[GradientEdge, ...]:
    """Returns the edges of the tensors that gates were made for."""
    edges: list[Any] = []
    for gate in gates:
        edges.append(_new_edge((*gate.next_functions[0], *_REST)))
    return tuple(edges)


# Records


@dataclass(slots=True)
class TensorMeta:
    """The shape, type and device that the gradient of a tensor must have."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class SendRecord:
    """A sent message: its tensors that require grad, in their order.

    Attributes:
        message_id: Number of the message in the group.
        to_worker: The receiver, which will send the gradients.
        metas: Shape, type and device of each gradient.
        gates: For each tensor a node that leads to its edge; see ``gates``. They keep the graph
            alive, which an edge to a Python node does not.
        is_back: Whether its tensors were placed as those of an answer; see ``worker.peers``.
        edges: Where in the graph the gradients go; made by the first pass that looks at it.
    """

    message_id: int
    to_worker: int
    metas: tuple[TensorMeta, ...]
    gates: tuple[Node, ...]
    is_back: bool = False
    edges: tuple[GradientEdge, ...] = ()


@dataclass(slots=True)
class ReceiveRecord:
    """A received message: its tensors that required grad, in their order.

    Attributes:
        message_id: Number of the message in the group.
        from_worker: The sender, which waits for the gradients.
        nodes: The placeholders, one for each tensor.
        metas: Shape, type and device of each tensor on this worker.
        sends_before: How many messages this worker had sent in the context before. No message
            sent later can lead to this one.
        is_answer: Whether it is the result of a call that this worker made.
        is_back: Whether its tensors were placed as those of an answer: those of an answer, and
            recorded gradients of the arguments of a call.
        is_outside: Whether it belongs to no context.
    """

    message_id: int
    from_worker: int
    nodes: list[Node]
    metas: tuple[TensorMeta, ...]
    sends_before: int = 0
    is_answer: bool = False
    is_back: bool = False
    is_outside: bool = False


def send_record(
    message_id: int, to_worker: int, tensors: Sequence[Tensor], is_back: bool = False
) -> SendRecord:
    """Returns the record of a message with ``tensors``, which require grad."""
    return SendRecord(message_id, to_worker, metas_of(tensors), gates_of(tensors), is_back)


def metas_of(tensors: Iterable[Tensor]) -> tuple[TensorMeta, ...]:
    """Returns the shape, type and device of each of ``tensors``."""
    metas: list[TensorMeta] = []
    for tensor in tensors:  # Without a function for a list: it runs for each recorded message.
        metas.append(TensorMeta(tensor.shape, tensor.dtype, tensor.device))
    return tuple(metas)
