"""Gates: nodes in which a run of torch's engine waits for the gradients of a sent message.

The problem: in ``h = remote(b) + b`` the gradient of ``b`` is a sum. One part comes out of the
graph of this worker, the other one in a message that is sent only after this worker has run the
graph behind ``h``. Two runs of the engine would run the graph behind ``b`` on parts of its
gradients, or once for each part.

The idea: one run, in which a gate takes the place of the missing gradient. A gate is the node of
an alias of a sent tensor, made when the message was sent. A run that has to wait starts at the gate
too, with zeros that take no memory. A hook of the gate then waits, and puts the gradients that have
come in the place of the zeros. The engine runs ready nodes in descending order of their sequence
numbers. Gates have the lowest, those of earlier messages lower ones. So all that is ready has run
when a gate waits, and it waits for the latest message, which no other one that is missing can wait
for. The proof is in ``docs/protocols/autograd.md``.

Rules of the file: the engine must run all nodes in the calling thread, in one queue. A node may run
in several runs at once, of a graph that is retained; each run knows its gates by their zeros.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils._python_dispatch import _disable_current_modes

from torchweft.ids import WORKER_SHIFT

# Making gates


class _Alias(torch.autograd.Function):
    """Makes a gate for a tensor of any type and layout."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        take: Callable[[], Tensor | None] | None = getattr(gradient, _TAKE, None)
        return gradient if take is None else take()


_TAKE = "_weft_take"
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


# Passing gates


class Opening:
    """A gate in one run.

    Args:
        gate: The gate.
        take: Returns its gradient, or None for an undefined one; may block.
    """

    def __init__(self, gate: Node, take: Callable[[], Tensor | None]) -> None:
        self.edge = GradientEdge(gate, 0)
        self.zeros = _zeros_at(gate)
        self._take = take
        self._handle: Any = None
        if isinstance(gate, torch._C._FunctionBase):
            setattr(self.zeros, _TAKE, take)
        else:
            self._handle = gate.register_prehook(self._replace)

    def _replace(self, incoming: tuple[Tensor | None, ...]) -> tuple[Tensor | None] | None:
        if incoming[0] is not self.zeros:
            return None
        gradient = self._take()
        if gradient is not None and gradient.layout is not _STRIDED:
            gradient = gradient.to_dense()  # A hook may not change the layout.
        return (gradient,)

    def close(self) -> None:
        """Ends the part of the gate in the run."""
        if self._handle is not None:
            self._handle.remove()


def _zeros_at(gate: Any) -> Tensor:
    meta = gate._input_metadata[0]
    return torch.zeros((), dtype=meta.dtype, device=meta.device).expand(meta.shape)


class Probe:
    """Tells of the gradient of a node's first output, after all hooks of its tensor.

    Unlike a hook of the node, it is called also if the engine ends there.

    Args:
        node: The node.
        take: Called with the gradient, or None for an undefined one.
    """

    def __init__(self, node: Any, take: Callable[[Tensor | None], None]) -> None:
        self._hooks: OrderedDict[int, Callable[[Tensor | None], None]] = OrderedDict({0: take})
        owner: Any = torch.empty(0)
        owner._backward_hooks = self._hooks
        node._register_hook_dict(owner)

    def close(self) -> None:
        """Ends the calls. The node keeps an empty table."""
        self._hooks.clear()


# Order

_ORDINARY = 1 << 60
"""Added to the sequence numbers of ordinary nodes."""
_COUNTER = (1 << WORKER_SHIFT) - 1


def put_last(gates: Iterable[tuple[int, Node]], others: Iterable[Any]) -> None:
    """Has the engine run gates only if no other node is ready, the latest message's first.

    The numbers are the same in each run of a gate or a node, since runs may take place at once.

    Args:
        gates: The gates, with the numbers of their messages. A worker counts its messages.
        others: All other nodes of the run. Each thread numbers its nodes by itself, so one of
            them may have any number; their order among each other stays.
    """
    for message_id, gate in gates:
        gate._set_sequence_nr(message_id & _COUNTER)  # type: ignore[attr-defined]
    for node in others:
        number = node._sequence_nr()
        if number < _ORDINARY:
            node._set_sequence_nr(number + _ORDINARY)
