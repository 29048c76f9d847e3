"""Refuses passes of PyTorch alone that would leave out what other workers computed.

``loss.backward()`` runs every node, so it runs into a placeholder, which raises. A pass for certain
inputs, as ``torch.autograd.grad(loss, w)`` and ``loss.backward(inputs=[w])``, runs only nodes that
lead to an input here. It would leave out the part of the gradient that leads over another worker,
and say nothing. No hook can tell, since nothing of that part runs.

The idea: PyTorch's engine is an object with one method, which all passes of Python call. An
object of a subclass takes its place, and looks at passes for inputs before they begin. The
gradient is incomplete if the roots lead to a tensor of another worker, and if a message that this
worker had sent before leads to an input. That takes a walk through the graph, which is made only
where this worker has exchanged tensors with a graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from torchweft.autograd.contexts import Contexts, SendRecord
from torchweft.autograd.multi_grad_hooks import are_registered, gathered_by
from torchweft.autograd.outside import OutsideRecords
from torchweft.errors import AutogradError

_variable: Any = torch.autograd.Variable
_engine: Any = getattr(_variable, "_execution_engine", None)


class Recorder(Protocol):
    """What one worker has sent and received."""

    contexts: Contexts
    outside: OutsideRecords

    def name_of(self, worker: int) -> str:
        """Returns the name of a worker."""
        ...


_watched: weakref.WeakSet[Recorder] = weakref.WeakSet()


def watch(recorder: Recorder) -> None:
    """Looks at PyTorch's passes for inputs from now on, for as long as ``recorder`` lives."""
    _watched.add(recorder)
    if _engine is not None and type(_variable._execution_engine) is type(_engine):
        _variable._execution_engine = _Watching()


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_Engine: Any = object if _engine is None else type(_engine)


class _Watching(_Engine):  # type: ignore[misc]
    """PyTorch's engine, which looks at passes for inputs before they begin."""

    def run_backward(
        self,
        roots: Sequence[Any],
        gradients: Any,
        retain_graph: Any,
        create_graph: Any,
        inputs: Sequence[Any] = (),
        *others: Any,
        **options: Any,
    ) -> Any:
        """Runs a pass, or raises AutogradError if it would leave out a part."""
        if inputs:
            _check(roots, inputs)
        begin = super().run_backward
        if not are_registered():
            return begin(roots, gradients, retain_graph, create_graph, inputs, *others, **options)
        with gathered_by(None):  # It may begin in a hook of a pass of Weft.
            return begin(roots, gradients, retain_graph, create_graph, inputs, *others, **options)


def _check(roots: Sequence[Any], inputs: Sequence[Any]) -> None:
    for recorder in list(_watched):
        contexts = [each for each in recorder.contexts.all() if each.has_both_ways()]
        if not contexts and not recorder.outside.sends():
            continue
        reached = _behind(_nodes(roots))
        wanted = set(_nodes(inputs))
        for context in contexts:
            records = [each for node, each in list(context.receive_of.items()) if node in reached]
            if records:
                latest = max(records, key=lambda record: record.sends_before)
                before = context.sends()[: latest.sends_before]
                if not wanted.isdisjoint(_behind(_sent(before))):
                    raise _left_out(recorder.name_of(latest.from_worker))
        name = _led_outside(recorder, reached, wanted)
        if name is not None:
            raise _left_out(name)


def check_inside(recorder: Recorder, roots: Sequence[GradientEdge], inputs: Sequence[Any]) -> None:
    """Raises AutogradError if gradients may lead over calls that were made outside of contexts.

    Args:
        recorder: The worker.
        roots: Where the pass begins.
        inputs: The tensors whose gradients a pass in a context is to return.
    """
    if not recorder.outside.sends():
        return
    name = _led_outside(recorder, _behind(_nodes(roots)), set(_nodes(inputs)))
    if name is not None:
        raise AutogradError(
            f"the outputs lead to a tensor that worker {name!r} computed in a call outside of "
            "autograd contexts, perhaps from the inputs: make the call within the context, or "
            "call torchweft.autograd.backward(loss)",
            worker=name,
        )


def _led_outside(recorder: Recorder, reached: set[Node], wanted: set[Node]) -> str | None:
    """Returns the worker that computed, outside of contexts, a tensor perhaps from the inputs."""
    sends = recorder.outside.sends()
    if not sends or wanted.isdisjoint(_behind(_sent(sends))):
        return None
    ends = recorder.outside.ends_beside({}, lambda _: None)
    found = [end for node in reached if (end := ends.get(node)) is not None]
    return recorder.name_of(found[0].from_worker) if found else None


def _sent(records: Iterable[SendRecord]) -> list[Node]:
    return [node for record in records for node in _nodes(record.edges)]


def _left_out(name: str) -> AutogradError:
    return AutogradError(
        "torch.autograd.grad and backward(inputs=) would leave out a part of the gradient: the "
        f"pass leads to a tensor that worker {name!r} computed, perhaps from the inputs. Call "
        "torchweft.autograd.grad(context_id, outputs, inputs) within `with "
        "torchweft.autograd.context() as context_id:`, or detach() the tensor if it is meant to "
        "be a constant",
        worker=name,
    )


def _nodes(edges: Iterable[Any]) -> list[Node]:
    """Returns the nodes of tensors and edges; of a leaf, the node that accumulates there.

    Tensors of ``torch.func`` are left out: they have graphs of their own, and cannot be sent.
    """
    nodes = []
    for edge in edges:
        if isinstance(edge, GradientEdge):
            nodes.append(edge.node)
        elif isinstance(edge, Tensor) and edge.requires_grad and not _is_wrapped(edge):
            if edge.is_leaf and edge.layout is not torch.strided:
                continue  # torch finds no node of it, and nothing is behind it.
            nodes.append(get_gradient_edge(edge).node)
    return nodes


def _behind(nodes: Iterable[Node]) -> set[Node]:
    """Returns the nodes and all nodes to which they lead on this worker."""
    found = set(nodes)
    stack = list(found)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                stack.append(node)
    return found
