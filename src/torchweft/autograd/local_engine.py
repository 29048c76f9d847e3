"""The calls that Weft makes to torch's autograd engine, and the gates in which such a call waits.

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

Rules of the file: in a run with gates the engine must run all nodes in the calling thread, in one
queue. A node may run in several runs at once, of a graph that is retained; each run knows its gates
by their zeros.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from _thread import get_ident
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchweft.autograd.records import TAKE, hooks_at
from torchweft.errors import WeftError
from torchweft.ids import WORKER_SHIFT

# torch.autograd.grad checks shapes with torch.fx's symbolic shapes. Their first import takes 0.3 s,
# and the check takes half the time of a small call. Here the shapes are known to be right.
_engine: Any = torch.autograd.Variable._execution_engine


_new_edge: Any = functools.partial(tuple.__new__, GradientEdge)
_FIRST_OUTPUT = [itertools.repeat(each) for each in (0, *GradientEdge._field_defaults.values())]


def edges_at(nodes: Iterable[Node]) -> list[GradientEdge]:
    """Returns the edges to the first output of each node."""
    # Without a step of Python for each: a module may have a thousand leaves.
    return list(map(_new_edge, zip(nodes, *_FIRST_OUTPUT, strict=False)))


def gradients_at(
    inputs: Iterable[GradientEdge],
    edges: tuple[GradientEdge, ...],
    gradients: tuple[Tensor, ...],
    *,
    retain_graph: bool,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Runs a graph from edges with gradients to requested edges.

    Args:
        inputs: Edges whose gradients are wanted; nothing behind them runs.
        edges: Edges at which the run starts.
        gradients: The gradients there, of the right shapes.
        retain_graph: Whether the saved tensors of the nodes must survive.
        create_graph: Whether the run itself is recorded.

    Returns:
        A gradient for each of ``inputs``, or None if none arrives.
    """
    captured: tuple[Tensor | None, ...] = _engine.run_backward(
        edges, gradients, retain_graph, create_graph, tuple(inputs), True, accumulate_grad=False
    )
    return captured


def accumulate(
    tensors: tuple[Any, ...], gradients: tuple[Tensor, ...], leaves: tuple[Tensor, ...] = ()
) -> None:
    """Runs the graph behind tensors, and adds to ``.grad`` of its leaves. The graph is freed.

    Runs the hooks of the leaves and of the accumulating nodes; the latter wait for collectives.

    Args:
        tensors: Tensors or edges at which the run starts; a leaf gets its gradient itself.
        gradients: The gradients there, of the right shapes.
        leaves: The leaves that get a gradient; all if empty.
    """
    _engine.run_backward(tensors, gradients, False, False, leaves, True, accumulate_grad=True)


def run_from(
    inputs: Sequence[GradientEdge],
    edges: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    openings: Sequence[Opening],
    cuts: Iterable[Node],
    *,
    retain_graph: bool,
    create_graph: bool,
) -> Sequence[Tensor | None]:
    """Runs a graph from edges with gradients and from gates; see ``gradients_at``.

    Args:
        inputs: Edges whose gradients are wanted.
        edges: Edges at which the run starts.
        gradients: The gradients there.
        openings: Gates at which it starts too. One queue, of the calling thread, runs all nodes.
        cuts: Nodes that pass no gradient on.
        retain_graph: Whether the saved tensors of the nodes must survive.
        create_graph: Whether the run itself is recorded.
    """
    if not inputs or not (edges or openings):
        return [None] * len(inputs)
    run = functools.partial(
        gradients_at,
        inputs,
        (*edges, *[opening.edge for opening in openings]),
        (*gradients, *[opening.zeros for opening in openings]),
        retain_graph=retain_graph,
        create_graph=create_graph,
    )
    if not openings and not cuts:
        return run()
    # Otherwise nodes of other devices run in a thread for each device, which all passes share.
    with torch.autograd.set_multithreading_enabled(False), _without_gradients(cuts):
        return run()


@contextlib.contextmanager
def _without_gradients(nodes: Iterable[Node]) -> Iterator[None]:
    """Has nodes get no gradient in runs of this thread within a ``with`` block.

    The engine runs a node if any target lies behind it, also if it has captured the gradient there.
    """
    thread = get_ident()

    def take_away(incoming: tuple[Any, ...]) -> tuple[None, ...] | None:
        return (None,) * len(incoming) if get_ident() == thread else None

    handles = [node.register_prehook(take_away) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


OF_TORCH = "an operation of torch"
"""The operation of an error if it is no function of the user."""


def operation_of(error: BaseException) -> str:
    """Returns the name of the user's function whose backward raised ``error``.

    torch does not report which of its own operations failed; its message usually does.
    """
    is_weft = isinstance(error, WeftError)
    name = "exchanging gradients" if is_weft else OF_TORCH
    step: TracebackType | None = error.__traceback__
    while step is not None:
        for value in list(step.tb_frame.f_locals.values()):
            if isinstance(value, torch._C._FunctionBase):
                name = type(value).__name__.removesuffix("Backward") + ".backward"
        step = step.tb_next
    return name


# Passing gates


_registering = threading.Lock()
"""Held while hooks of a gate are registered: two threads that are the first to do so would give the
gate two tables of hooks, the second one while a run of the first thread may be looking at them."""


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
            setattr(self.zeros, TAKE, take)
        else:
            with _registering:
                self._handle = gate.register_prehook(self._replace)

    def _replace(self, incoming: tuple[Tensor | None, ...]) -> tuple[Tensor | None] | None:
        if incoming[0] is not self.zeros:
            return None
        gradient = self._take()
        if gradient is not None and gradient.layout is not torch.strided:
            gradient = gradient.to_dense()  # A hook may not change the layout.
        return (gradient,)

    def close(self) -> None:
        """Ends the part of the gate in the run."""
        if self._handle is not None:
            self._handle.remove()


def _zeros_at(gate: Any) -> Tensor:
    meta = gate._input_metadata[0]
    return torch.zeros((), dtype=meta.dtype, device=meta.device).expand(meta.shape)


class _Probing(threading.local):
    """The run of the engine in a thread whose probes are to take gradients, if any."""

    run: object = None


probing = _Probing()


@contextlib.contextmanager
def probed_by(run: object) -> Iterator[None]:
    """Has only the probes of a run take gradients in this thread, within a ``with`` block.

    A hook may begin another pass through the same graph; None stands for such a pass.
    """
    before, probing.run = probing.run, run
    try:
        yield
    finally:
        probing.run = before


class Probe:
    """Tells of the gradient of a received tensor, after all hooks of the tensor.

    Unlike a hook of the node, it is called also if the engine ends there.

    Args:
        node: The placeholder of the tensor.
        take: Called with the gradient, or None for an undefined one.
        run: The run. In others of the same node, ``take`` is not called; see ``probed_by``.
    """

    def __init__(self, node: Node, take: Callable[[Tensor | None], None], run: object) -> None:
        self._take = take
        self._run = run
        self._hooks = hooks_at(node)
        self._hooks[self] = self._see

    def _see(self, gradient: Tensor | None) -> None:
        if probing.run is self._run:
            self._take(gradient)

    def close(self) -> None:
        """Ends the calls."""
        self._hooks.pop(self, None)


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
