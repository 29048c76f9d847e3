"""Notes fetched tensors, and names the operations in parts of backward passes."""

from __future__ import annotations

import itertools
import time
from _thread import get_ident
from collections import Counter
from collections.abc import Iterable

from torch.autograd.graph import Node

from torchweft.agent.peers import Peer
from torchweft.agent.tensor_messages import TensorMessage, TensorMessages
from torchweft.autograd.local_pass import LocalPass
from torchweft.autograd.records import PLACEHOLDER
from torchweft.autograd.walk import Reached
from torchweft.protocol.observing.trace import FETCH, RAN
from torchweft.rpc.tracing.rows import Note, Number

_MOST_NODES = 2000
"""Nodes of a part of a pass that are looked at for their names."""
_MOST_NAMES = 40


def traced_messages(note: Note, number: Number) -> type[TensorMessages]:
    """Returns a type of ``TensorMessages`` that notes how long it fetches tensors."""

    class Traced(TensorMessages):
        """Notes how long it fetches tensors."""

        def fetch(self, peer: Peer, message: TensorMessage) -> None:
            if not message.channel_table:
                super().fetch(peer, message)
                return
            began_s = time.monotonic()
            try:
                super().fetch(peer, message)
            finally:
                ended_s = time.monotonic()
                details = (("from", peer.name),)
                row = (number(), RAN, began_s, ended_s, get_ident(), FETCH, "tensors", 0, details)
                note(row)

    return Traced


def operations_due(local: LocalPass) -> dict[str, int]:
    """Returns the names of the operations that a part of a pass runs next, and their numbers."""
    touched = [component.reached for component in local._touched.values()]
    due = [reached for _, reached, gradients, _ in local._due if gradients is not None]
    return _operations([*due, *touched])


def _operations(parts: Iterable[Reached]) -> dict[str, int]:
    """Returns the names of the operations in parts of a graph, the first to run first."""
    found: Counter[str] = Counter()
    seen: set[Node | None] = {None}
    level = [edge[0] for reached in parts for send in reached.sends for edge in send.edges]
    while level and len(seen) < _MOST_NODES:
        nodes = [node for node in dict.fromkeys(level) if node not in seen]
        seen.update(nodes)
        nodes = [node for node in nodes if node is not None and type(node) is not PLACEHOLDER]
        found.update([node.name() for node in nodes if node.next_functions])
        level = [target for node in nodes for target, _ in node.next_functions if target]
    return dict(itertools.islice(found.items(), _MOST_NAMES))
