"""The messages of autograd contexts as nodes of the graph.

PyTorch puts a node of its own at each end of a message. Weft keeps a record of each sent message,
and a placeholder, which is a real node, for each received tensor. Here both have PyTorch's names,
and all placeholders of a message appear as the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.autograd.graph import Node

from torchweft.autograd.contexts import ReceiveRecord, SendRecord
from torchweft.compat.autograd import DistAutogradContext

_SEND = "torch::distributed::autograd::SendRpcBackward"
_RECEIVE = "torch::distributed::autograd::RecvRpcBackward"
_TRAVEL = (
    *("ValuesBackward", "CoalesceBackward", "SparseCooTensorWithDimsAndTensorsBackward"),
    *("_ValuesBackward", "_WithValuesBackward"),
)

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


def send_functions(context: DistAutogradContext) -> dict[int, SendNode]:
    """Returns the sent messages of a context, by number."""
    receives = context._context.receive_of
    return {record.message_id: SendNode(record, receives) for record in context._context.sends()}


def recv_functions(context: DistAutogradContext) -> dict[int, GraphNode]:
    """Returns the received messages of a context, by number."""
    receives = context._context.receive_of
    return {
        record.message_id: GraphNode(record.nodes[0], receives)
        for record in context._context.receives()
    }


def install() -> None:
    """Adds the messages of a context to ``torchweft.compat.autograd.DistAutogradContext``."""
    added: Any = DistAutogradContext
    added._send_functions, added._recv_functions = send_functions, recv_functions
