"""Autograd contexts that tests manage by hand, and their messages as nodes of the graph.

PyTorch puts a node of its own at each end of a message. Weft keeps a record of each sent message,
and a placeholder, which is a real node, for each received tensor. Here both have PyTorch's names,
and all placeholders of a message appear as the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.autograd.graph import Node

from torchweft.autograd.contexts import (
    Context,
    Contexts,
    ReceiveRecord,
    SendRecord,
    current_id,
    set_current_id,
)
from torchweft.autograd.engine import current_engine
from torchweft.compat import autograd
from torchweft.errors import AutogradError
from torchweft.ids import WORKER_SHIFT, scoped_id

_SEND = "torch::distributed::autograd::SendRpcBackward"
_RECEIVE = "torch::distributed::autograd::RecvRpcBackward"
_TRAVEL = ("ValuesBackward", "CoalesceBackward", "SparseCooTensorWithDimsAndTensorsBackward")

Receives = Mapping[Node, ReceiveRecord]
Edges = tuple[tuple["GraphNode | None", int], ...]


def _seen(node: Node, output_nr: int) -> tuple[Node, int]:
    """Skips nodes that only take apart a sparse tensor for a message, or put it together."""
    seen: Any = node
    while seen.name().startswith(_TRAVEL):
        seen, output_nr = seen.next_functions[0]
    return seen, output_nr


class GraphNode:
    """A node of the local graph, as seen on a walk from a sent message.

    It equals the node itself, and has all its attributes. A placeholder has the name of PyTorch's
    node, and no further nodes: the graph continues at another worker.

    Args:
        node: The node; not one that ``_seen`` skips.
        receives: The records of received messages, by placeholder.
    """

    def __init__(self, node: Node, receives: Receives) -> None:
        self._node = node
        self._receives = receives

    def name(self) -> str:
        """Returns what kind of node it is."""
        return _RECEIVE if self._node in self._receives else self._node.name()

    @property
    def next_functions(self) -> Edges:
        """The nodes that it leads to, each with the number of one of its outputs."""
        if self._node in self._receives:
            return ()
        return tuple(
            (None, output_nr) if node is None else _edge(node, output_nr, self._receives)
            for node, output_nr in self._node.next_functions
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, GraphNode):
            return self._node == other._node
        return isinstance(other, Node) and self._node == _edge(other, 0, self._receives)[0]._node

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return f"<{self.name()} of {self._node!r}>"


def _edge(node: Node, output_nr: int, receives: Receives) -> tuple[GraphNode, int]:
    node, output_nr = _seen(node, output_nr)
    if node in receives:
        nodes = receives[node].nodes
        node, output_nr = nodes[0], nodes.index(node)
    return GraphNode(node, receives), output_nr


class SendNode:
    """A sent message, as a node that leads to the nodes of its tensors."""

    def __init__(self, record: SendRecord, receives: Receives) -> None:
        self._record = record
        self._receives = receives

    def name(self) -> str:
        """Returns what kind of node it is."""
        return _SEND

    @property
    def next_functions(self) -> Edges:
        """Where the gradients of the tensors go, in their order."""
        return tuple(
            _edge(edge.node, edge.output_nr, self._receives) for edge in self._record.edges
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SendNode) and self._record is other._record

    def __hash__(self) -> int:
        return hash(self._record.message_id)

    def __repr__(self) -> str:
        return f"<{_SEND} of message {self._record.message_id}>"


class DistAutogradContext:
    """This worker's part of a context, under PyTorch's names.

    Args:
        context: The context itself.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def _context_id(self) -> int:
        return self._context.id

    def _known_worker_ids(self) -> set[int]:
        return set(self._context.known_workers)

    def _send_functions(self) -> dict[int, SendNode]:
        receives = self._context.receive_of
        return {record.message_id: SendNode(record, receives) for record in self._context.sends()}

    def _recv_functions(self) -> dict[int, GraphNode]:
        receives = self._context.receive_of
        return {
            record.message_id: GraphNode(record.nodes[0], receives)
            for record in self._context.receives()
        }


def _contexts() -> Contexts:
    contexts: Contexts = current_engine().contexts
    return contexts


def get_max_id() -> int:
    """Returns the highest number that a context of this worker may have."""
    return scoped_id(_contexts().worker, (1 << WORKER_SHIFT) - 1)


def new_context() -> DistAutogradContext:
    """Opens a context and makes it that of this thread, until ``release_context``."""
    return retrieve_context(autograd.context().__enter__())


def release_context(context_id: int) -> None:
    """Ends a context that is alive here, on all workers that know it."""
    engine = current_engine()
    engine.contexts.get(context_id)
    engine.release(context_id)
    if current_id() == context_id:
        set_current_id(0)


def retrieve_context(context_id: int) -> DistAutogradContext:
    """Returns a context that is alive here.

    Raises:
        AutogradError: The context is not alive here.
    """
    return DistAutogradContext(_contexts().get(context_id))


def current_context() -> DistAutogradContext:
    """Returns the context of this thread.

    Raises:
        AutogradError: The thread has no context.
    """
    context_id = current_id()
    if not context_id:
        raise AutogradError("Current thread doesn't have a valid autograd context")
    return retrieve_context(context_id)


def install() -> None:
    """Adds PyTorch's private names to ``torchweft.compat.autograd``."""
    vars(autograd).update(
        DistAutogradContext=DistAutogradContext,
        _current_context=current_context,
        _get_max_id=get_max_id,
        _new_context=new_context,
        _release_context=release_context,
        _retrieve_context=retrieve_context,
    )
