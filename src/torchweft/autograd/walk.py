"""Walks the graph of one worker: finds what each send reaches, and which sends share nodes.

All walks end at placeholders (where the graph continues on another worker), at leaves, and at
stops: nodes beyond which a pass needs no gradient. The loops here run once for each node of the
user's graph, so they are written out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchweft.autograd.gradients import UNDEFINED, Gradient
from torchweft.autograd.hooks import at_received, has_leaf_hooks
from torchweft.autograd.local_engine import edges_at
from torchweft.autograd.records import ReceiveRecord, SendRecord
from torchweft.protocol.backward import Progress

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
    cuts: Collection[Node] = ()
    """Stops that the engine would run through unless prevented."""


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

    def component_at(self, node: Node) -> Reached | None:
        """Returns the component that a node belongs to, if any; valid after ``components``."""
        return self._reached_of.get(self._visitor.get(node, _NO_SEND))

    def forget(self, message_ids: Collection[int]) -> None:
        """Lets go of all that walks from certain sends, a whole component, were first to visit."""
        for node in [*self.nodes_of(message_ids)]:
            del self._visitor[node]
        for number in message_ids:
            self._reached_of.pop(number, None)

    def nodes_of(self, message_ids: Collection[int]) -> Iterator[Node]:
        """Yields the nodes that walks from certain sends were the first to visit."""
        for node, number in self._visitor.items():
            if number in message_ids and node is not None:
                yield node


_NO_SEND = -1


def next_nodes(node: Node) -> list[Node]:
    """Returns the nodes to which a node leads on this worker."""
    return [target for target, _ in node.next_functions if target is not None]


def walk(
    seeds: Iterable[Node],
    visited: set[Node],
    nexts: Callable[[Node], Iterable[Node]] = next_nodes,
) -> Iterator[Node]:
    """Yields ``seeds`` and all nodes they lead to, except nodes in ``visited``."""
    stack = list(seeds)
    while stack:
        node = stack.pop()
        if node not in visited:
            visited.add(node)
            yield node
            stack.extend(nexts(node))


def writes_to_views(edges: Iterable[GradientEdge], ends: Mapping[Node, End]) -> bool:
    """Returns whether ``edges`` reach an in-place operation on a view."""
    nodes = walk(
        [edge.node for edge in edges],
        set(),
        lambda node: () if node in ends else next_nodes(node),
    )
    return any(type(node).__name__ == "CopySlices" for node in nodes)


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


# Answers

Answer = tuple[ReceiveRecord, list[Gradient]]
"""The complete gradients of a received message."""


def note_reached(
    progress: Progress,
    found: Mapping[Node, ReceiveRecord],
    answered: Collection[int] = (),
    answers_all: bool = False,
) -> None:
    """Notes the messages and tensors that have been reached, and are not answered yet.

    Args:
        progress: Gets the notes.
        found: Received messages by the placeholders that were reached for the first time.
        answered: Messages to leave out.
        answers_all: Whether each tensor of a message counts as reached.
    """
    nodes_of: dict[int, list[Node]] = {}
    for node, receive in found.items():
        if receive.message_id not in answered:
            nodes_of.setdefault(receive.message_id, []).append(node)
    progress.reached += nodes_of
    if answers_all:
        return
    parts: dict[int, int] = {}
    for message_id, nodes in nodes_of.items():
        among = found[nodes[0]].nodes
        if len(nodes) < len(among):
            parts[message_id] = sum([1 << among.index(node) for node in nodes])
    if parts:
        progress.add_parts({}, parts)


def pairs_of(
    variables: Iterable[Any], gradients: Iterable[Tensor | None]
) -> list[tuple[Any, Tensor]]:
    """Returns the leaves that have a gradient, with it."""
    return [
        (variable, gradient)
        for variable, gradient in zip(variables, gradients, strict=True)
        if gradient is not None
    ]


def answers_of(
    receives: Mapping[Node, ReceiveRecord],
    gradients: Iterable[Tensor | None],
    create_graph: bool,
) -> tuple[dict[int, Answer], list[Node]]:
    """Returns the gradients of messages by their numbers, and the placeholders without a gradient.

    Args:
        receives: The messages by their placeholders.
        gradients: The gradient at each placeholder, if any.
        create_graph: Whether the pass is recorded.
    """
    answers: dict[int, Answer] = {}
    without: list[Node] = []
    for (node, receive), gradient in zip(receives.items(), gradients, strict=True):
        if gradient is None:
            without.append(node)
        else:
            gradient = at_received(node, gradient, create_graph)
        if len(receive.nodes) == 1:
            answers[receive.message_id] = (receive, [gradient])
            continue
        answer = answers.get(receive.message_id)
        if answer is None:
            answer = answers[receive.message_id] = (receive, [None] * len(receive.nodes))
        answer[1][receive.nodes.index(node)] = gradient
    return answers, without


def mark_used(
    answers: Mapping[int, Answer],
    without: Iterable[Node],
    receives: Mapping[Node, ReceiveRecord],
    used: Container[Node],
) -> None:
    """Marks the gradients of tensors that were used as undefined, where there is none."""
    for node in without:
        if node in used:
            receive = receives[node]
            _, gradients = answers[receive.message_id]
            gradients[receive.nodes.index(node)] = UNDEFINED
