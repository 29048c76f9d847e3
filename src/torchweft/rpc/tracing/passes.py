"""Names the operations in parts of backward passes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from torch.autograd.graph import Node

from torchweft.autograd.contexts import PLACEHOLDER
from torchweft.autograd.graph import LocalPass
from torchweft.autograd.walk import Reached

_MOST_NODES = 2000
"""Nodes of a part of a pass that are looked at for their names."""
_MOST_NAMES = 40


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
