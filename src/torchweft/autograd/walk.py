"""Walks the graph of one worker: finds what each send reaches, and which sends share nodes.

All walks end at placeholders (where the graph continues on another worker), at leaves, and at
stops: nodes beyond which a pass needs no gradient. The loops here run once for each node of the
user's graph, so they are written out.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchweft.autograd.contexts import ReceiveRecord, SendRecord
from torchweft.autograd.local_engine import edges_at, has_leaf_hooks

Next = tuple[Node | None, int]
Place = tuple[Node, int]
"""An output of a node."""


@final
class Stop(NamedTuple):
    """A node at which a pass ends: only the gradients of its outputs are wanted.

    Attributes:
        node: The node.
        is_hooked: Whether hooks must see the complete gradient of an output.
    """

    node: Node
    is_hooked: bool

    @property
    def places(self) -> list[Place]:
        """The places of its outputs."""
        count = len(self.node._input_metadata)
        return [(self.node, output_nr) for output_nr in range(count)]


End = ReceiveRecord | Stop
"""Describes a node at which a walk ends."""

Leaf = Tensor | Stop


class Live(NamedTuple):
    """A send, or the roots (number 0), with the places in the graph where its gradients go."""

    message_id: int
    edges: tuple[GradientEdge, ...]


Sent = Live | SendRecord
"""A send, whose gradients go to its ``edges``."""


class Reached(NamedTuple):
    """What the sends of one component reach."""

    sends: list[Sent]
    leaves: dict[Node, Leaf]
    receives: dict[Node, ReceiveRecord]
    """Received messages by their reached placeholders."""
    passed: Sequence[Place] = ()
    """Node outputs, of any component, that a pass goes through and whose gradients are wanted."""
    cuts: Container[Node] = ()
    """Stops that the engine would run through unless prevented."""

    def message_ids(self) -> list[int]:
        """Returns the numbers of the received messages."""
        return list({receive.message_id: None for receive in self.receives.values()})


def targets_of(
    leaves: Mapping[Node, Leaf], receives: Iterable[Node], passed: Sequence[Place]
) -> tuple[list[GradientEdge], list[Any]]:
    """Returns the edges at which to capture gradients, and a key for each before those of receives.

    The key of a leaf is the leaf. The key of a stop's output, or of a passed output, is its place.

    Args:
        leaves: The leaves.
        receives: The placeholders.
        passed: Further outputs.
    """
    if not passed and Stop not in map(type, leaves.values()):
        return edges_at([*leaves, *receives]), list(leaves.values())
    variables: list[Any] = [*passed]
    targets = [GradientEdge(*place) for place in passed]
    for node, leaf in leaves.items():
        if type(leaf) is Stop:
            targets += [GradientEdge(*place) for place in leaf.places]
            variables += leaf.places
        else:
            targets.append(GradientEdge(node, 0))
            variables.append(leaf)
    return targets + edges_at(receives), variables


class SentGraph:
    """The graph behind the sends; each node is visited once.

    Args:
        ends: Where walks end, by node; may grow during a walk.
    """

    def __init__(self, ends: Mapping[Node, End]) -> None:
        self._ends = ends
        # By node, the send from which it was visited. No node counts as visited, from no send.
        self._visitor: dict[Node | None, int] = {None: _NO_SEND}
        self._reached_of: dict[int, Reached] = {}
        self._first_to: dict[int, int] = {}
        # For sends that share something with an earlier one: an earlier send of the component.
        self._parents: dict[int, int] = {}

    def add(self, send: Sent) -> Reached:
        """Walks from the edges of one send.

        Returns:
            What no earlier walk reached, and the leaves without hooks that earlier walks reached.
        """
        number = send.message_id
        leaves: dict[Node, Leaf] = {}
        receives: dict[Node, ReceiveRecord] = {}
        reached = self._reached_of[number] = Reached([send], leaves, receives)
        visitor, ends = self._visitor, self._ends
        stack: list[Iterable[Any]] = [send.edges]
        while stack:
            for edge in stack.pop():
                node = edge[0]
                if node in visitor:
                    if visitor[node] != number and node is not None:
                        self._meet(node, number)
                    continue
                visitor[node] = number
                nexts = node.next_functions
                if not nexts:
                    variable = getattr(node, "variable", None)
                    if variable is not None and variable.requires_grad:  # Not frozen since.
                        leaves[node] = variable
                elif node not in ends:
                    stack.append(nexts)
                elif type(end := ends[node]) is Stop:
                    leaves[node] = end
                else:
                    receives[node] = end
                    first = self._first_to.setdefault(end.message_id, number)
                    if first != number:
                        self._join(first, number)
        return reached

    def _meet(self, node: Node, number: int) -> None:
        """Notes that two sends reach ``node``; leaves without hooks do not connect them."""
        earlier = self._visitor[node]
        leaf = self._reached_of[earlier].leaves.get(node)
        if leaf is not None and not has_hooks(leaf, node):
            self._reached_of[number].leaves[node] = leaf
            return
        self._join(earlier, number)

    def _join(self, earlier: int, number: int) -> None:
        first, second = self._root_of(earlier), self._root_of(number)
        if first != second:
            self._parents[second] = first

    def _root_of(self, number: int) -> int:
        parents, root = self._parents, number
        while (parent := parents.get(root)) is not None:
            root = parent
        if root != number:
            parents[number] = root
        return root

    def components(self) -> dict[int, Reached]:
        """Returns the component of each send, by its number.

        Sends that share nodes or received messages, even indirectly, are one component. No send can
        be added afterwards.
        """
        wholes: dict[int, Reached] = {}
        if self._parents:
            for number, reached in self._reached_of.items():
                root = self._root_of(number)
                whole = self._reached_of[number] = wholes.setdefault(root, reached)
                if whole is not reached:
                    whole.sends.extend(reached.sends)
                    whole.leaves.update(reached.leaves)
                    whole.receives.update(reached.receives)
        return self._reached_of


_NO_SEND = -1


def writes_to_views(edges: Iterable[GradientEdge], ends: Mapping[Node, End]) -> bool:
    """Returns whether ``edges`` reach an in-place operation on a view."""
    seen = {edge.node for edge in edges}
    stack = list(seen)
    while stack:
        node = stack.pop()
        if type(node).__name__ == "CopySlices":
            return True
        if node in ends:
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return False


def receives_behind(
    edges: Iterable[GradientEdge], ends: Mapping[Node, End], visited: set[Node]
) -> dict[Node, ReceiveRecord]:
    """Returns the placeholders that ``edges`` lead to through nodes not yet in ``visited``."""
    found: dict[Node, ReceiveRecord] = {}
    stack = [edge.node for edge in edges]
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        end = ends.get(node)
        if type(end) is ReceiveRecord:
            found[node] = end
        elif end is None:
            stack.extend([target for target, _ in node.next_functions if target is not None])
    return found


def has_hooks(leaf: Leaf, node: Node) -> bool:
    """Returns whether the user registered hooks for the gradient of a leaf, or for its ``node``."""
    if type(leaf) is Stop:
        return leaf.is_hooked
    # Post-accumulate hooks are called in passes that add to ``.grad``.
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks) or has_leaf_hooks(node)


@dataclass(slots=True)
class Group:
    """The nodes with one signature, by kind.

    Attributes:
        signature: The sends that reach these nodes, one bit for each.
        leaves: Leaves without hooks that nodes of the group lead to, and its leaves with hooks.
        receives: Received messages by their placeholders in the group.
        nodes: All other nodes, in topological order.
    """

    signature: int
    leaves: dict[Node, Leaf] = field(default_factory=dict)
    receives: dict[Node, ReceiveRecord] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)


class Partition:
    """The nodes that several sends reach, by signature.

    Args:
        seeds: For each send its bit and its edges.
        ends: Where the graph ends, by node.
        leaves: All leaves that the sends reach.

    Attributes:
        groups: The groups that have not run.
    """

    def __init__(
        self,
        seeds: Iterable[tuple[int, tuple[GradientEdge, ...]]],
        ends: Mapping[Node, End],
        leaves: Mapping[Node, Leaf],
    ) -> None:
        seeds = list(seeds)
        self._ends = ends
        self._hooked = {node: leaf for node, leaf in leaves.items() if has_hooks(leaf, node)}
        self._plain = {node: leaf for node, leaf in leaves.items() if node not in self._hooked}
        self._edges = self._sorted_edges([edge.node for _, edges in seeds for edge in edges])
        self._signatures = self._signatures_from(seeds)
        self._place = {node: place for place, node in enumerate(self._edges)}
        self.groups = self._grouped()

    def signature_of(self, node: Node) -> int:
        """Returns the sends that reach ``node``; 0 for a leaf without hooks: it is always ready."""
        return self._signatures.get(node, 0)

    def take_ready(self, arrived: int) -> list[Group]:
        """Removes and returns the groups that may run now."""
        ready = [group for group in self.groups if not group.signature & ~arrived]
        self.groups = [group for group in self.groups if group.signature & ~arrived]
        return ready

    def in_order(self, groups: Iterable[Group]) -> list[Node]:
        """Returns the inner nodes of ``groups`` in topological order."""
        return sorted((node for group in groups for node in group.nodes), key=self._place.get)  # type: ignore[arg-type]

    def before_cut(
        self, groups: Iterable[Group], arrived: int, cuts: Container[Node] = ()
    ) -> list[Node]:
        """Returns the nodes of ``groups`` that lead to unready nodes or ``cuts``, in order.

        Nodes that lead there through other nodes of ``groups`` are included.
        """
        nodes = self.in_order(groups)
        leading_out: set[Node] = set()
        for node in reversed(nodes):
            for target, _ in self._edges[node]:
                if target is not None and (
                    target in leading_out or target in cuts or self.signature_of(target) & ~arrived
                ):
                    leading_out.add(node)
                    break
        return [node for node in nodes if node in leading_out]

    def _sorted_edges(self, seeds: Iterable[Node]) -> dict[Node, tuple[Next, ...]]:
        """Returns the edges out of each node, in topological order."""
        entered: dict[Node, tuple[Next, ...]] = {}
        finished: dict[Node, tuple[Next, ...]] = {}
        stack = [seed for seed in seeds if seed not in self._plain]
        while stack:
            node = stack[-1]
            if node in entered:
                stack.pop()
                # A node with several predecessors may be on the stack more than once.
                finished.setdefault(node, entered[node])
                continue
            edges = () if node in self._ends else node.next_functions
            entered[node] = edges
            stack.extend(self._unplain(edges, entered))
        return dict(reversed(finished.items()))

    def _unplain(self, edges: Iterable[Next], entered: Mapping[Node, object]) -> Iterator[Node]:
        for node, _ in edges:
            if node is not None and node not in entered and node not in self._plain:
                yield node

    def _signatures_from(
        self, seeds: Iterable[tuple[int, tuple[GradientEdge, ...]]]
    ) -> dict[Node, int]:
        signatures = dict.fromkeys(self._edges, 0)
        plain = self._plain
        for bit, edges in seeds:
            for edge in edges:
                if edge.node not in plain:
                    signatures[edge.node] |= bit
        for node, nexts in self._edges.items():
            signature = signatures[node]
            for target, _ in nexts:
                if target is not None and target not in plain:
                    signatures[target] |= signature
        self._join_messages(signatures)
        return signatures

    def _join_messages(self, signatures: dict[Node, int]) -> None:
        """Gives the placeholders of a message one signature: they are answered together."""
        joint: dict[int, int] = {}
        ends = [(node, self._ends[node]) for node in self._edges if node in self._ends]
        receives = [(node, end.message_id) for node, end in ends if type(end) is ReceiveRecord]
        for node, message_id in receives:
            joint[message_id] = joint.get(message_id, 0) | signatures[node]
        for node, message_id in receives:
            signatures[node] = joint[message_id]

    def _grouped(self) -> list[Group]:
        groups: dict[int, Group] = {}
        for node, nexts in self._edges.items():
            signature = self._signatures[node]
            group = groups.get(signature)
            if group is None:
                group = groups[signature] = Group(signature)
            end = self._ends.get(node)
            if type(end) is ReceiveRecord:
                group.receives[node] = end
            elif node in self._hooked:
                group.leaves[node] = self._hooked[node]
            else:
                group.nodes.append(node)
                for target, _ in nexts:
                    if target is not None and target in self._plain:
                        group.leaves[target] = self._plain[target]
        return list(groups.values())
