"""The graph of one worker: where passes start, which nodes sends reach, and where walks end.

All walks end at placeholders (where the graph continues on another worker), at leaves, and at
stops: nodes beyond which a pass needs no gradient. ``SentGraph.add`` runs once for each node of the
user's graph, so it is written out.

A pass for certain inputs may stop at an input unless another input lies upstream. No worker sees
the whole graph. But consider a path that leaves by a received message and returns from another
worker. It returns through a message that this worker sent before it received that one. Later
messages cannot matter, so this worker's graph and the order of its messages suffice. The result is
conservative: it may report a path to an input where there is none. A pass ends at an input, or goes
through it if other inputs may lie upstream. It also ends at a replaced result, whose graph was lost
with a worker: when the gradient there is complete, another pass continues from the replacement.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from torchweft.arguments import kind_of
from torchweft.autograd import hooks
from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import (
    PLACEHOLDER,
    UNDEFINED,
    Context,
    Gradient,
    ReceiveRecord,
    SendRecord,
    Sink,
    edges_at,
    sum_of,
)
from torchweft.engine.protocol.backward import Progress
from torchweft.errors import ArgumentTypeError, AutogradError

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

EndOf = Callable[[Node], End | None]
"""Returns the end of walks at a node, if they end there."""

Leaf = Tensor | Stop


class Reached(NamedTuple):
    """What the sends of one component reach."""

    sends: list[SendRecord]
    leaves: dict[Node, Leaf]
    receives: dict[Node, ReceiveRecord]
    """Received messages by their reached placeholders."""
    passed: Sequence[Place] = ()
    """Node outputs, of any component, that a pass goes through and whose gradients are wanted."""
    cuts: Collection[Node] = ()
    """Stops that the engine would run through unless prevented."""


_MOST_NODES = 2000
"""Nodes of a part of a pass that are looked at for their names."""
_MOST_NAMES = 40


def operations_behind(parts: Iterable[Reached]) -> dict[str, int]:
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


class SentGraph:
    """The graph behind the sends; each node is visited once.

    Args:
        end_of: Where walks end.
    """

    def __init__(self, end_of: EndOf) -> None:
        self._end_of = end_of
        # By node, the send from which it was visited. No node counts as visited, from no send.
        self._visitor: dict[Node | None, int] = {None: _NO_SEND}
        self._reached_of: dict[int, Reached] = {}
        self._first_to: dict[int, int] = {}
        # For sends that share something with an earlier one: an earlier send of the component.
        self._parents: dict[int, int] = {}

    def add(self, send: SendRecord) -> Reached:
        """Walks from the edges of one send.

        Returns:
            What no earlier walk reached, and the leaves without hooks that earlier walks reached.
        """
        number = send.message_id
        leaves: dict[Node, Leaf] = {}
        receives: dict[Node, ReceiveRecord] = {}
        reached = self._reached_of[number] = Reached([send], leaves, receives)
        visitor, end_of = self._visitor, self._end_of
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
                elif (end := end_of(node)) is None:
                    stack.append(nexts)
                elif type(end) is Stop:
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
    seeds: Iterable[Node], visited: set[Node], nexts: Callable[[Node], Iterable[Node]] = next_nodes
) -> Iterator[Node]:
    """Yields ``seeds`` and all nodes they lead to, except nodes in ``visited``."""
    stack = list(seeds)
    while stack:
        node = stack.pop()
        if node not in visited:
            visited.add(node)
            yield node
            stack.extend(nexts(node))


def walk_here(edges: Iterable[GradientEdge], visited: set[Node], end_of: EndOf) -> Iterator[Node]:
    """Yields the nodes that ``edges`` lead to, up to the ends, except nodes in ``visited``."""
    return walk(
        [edge.node for edge in edges],
        visited,
        lambda node: next_nodes(node) if end_of(node) is None else (),
    )


def writes_to_views(edges: Iterable[GradientEdge], end_of: EndOf) -> bool:
    """Returns whether ``edges`` reach an in-place operation on a view."""
    return any(type(node).__name__ == "CopySlices" for node in walk_here(edges, set(), end_of))


def receives_behind(
    edges: Iterable[GradientEdge], end_of: EndOf, visited: set[Node]
) -> dict[Node, ReceiveRecord]:
    """Returns the placeholders that ``edges`` lead to through nodes not yet in ``visited``."""
    found = [(node, end_of(node)) for node in walk_here(edges, visited, end_of)]
    return {node: end for node, end in found if type(end) is ReceiveRecord}


def has_hooks(leaf: Leaf, node: Node) -> bool:
    """Returns whether the user registered hooks for the gradient of a leaf, or for its ``node``."""
    if type(leaf) is Stop:
        return leaf.is_hooked
    # Post-accumulate hooks are called in passes that add to ``.grad``.
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks) or (
        hooks.has_node_hooks and hooks.are_at_leaf(node)
    )


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


def answers_of(
    receives: Mapping[Node, ReceiveRecord],
    gradients: Iterable[Tensor | None],
    create_graph: bool,
    used: Container[Node],
) -> list[Answer]:
    """Returns the gradients of messages.

    Args:
        receives: The messages by their placeholders.
        gradients: The gradient at each placeholder, if any.
        create_graph: Whether the pass is recorded.
        used: The placeholders that the pass reaches; there, a missing gradient is undefined.
    """
    answers: dict[int, Answer] = {}
    for (node, receive), gradient in zip(receives.items(), gradients, strict=True):
        found: Gradient = gradient
        if gradient is None:
            found = UNDEFINED if node in used else None
        elif hooks.has_node_hooks:
            found = hooks.at_received(node, gradient, create_graph)
        if len(receive.nodes) == 1:
            answers[receive.message_id] = (receive, [found])
            continue
        answer = answers.get(receive.message_id)
        if answer is None:
            answer = answers[receive.message_id] = (receive, [None] * len(receive.nodes))
        answer[1][receive.nodes.index(node)] = found
    return [*answers.values()]


# Runs of torch's engine

# torch.autograd.grad checks shapes with torch.fx's symbolic shapes. Their first import takes 0.3 s,
# and the check takes half the time of a small call. Here the shapes are known to be right.
ENGINE: Any = torch.autograd.Variable._execution_engine


def gradients_at(
    inputs: Sequence[GradientEdge],
    edges: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    mode: PassMode,
) -> Sequence[Tensor | None]:
    """Runs a graph from edges with gradients to requested edges.

    Args:
        inputs: Edges whose gradients are wanted; nothing behind them runs.
        edges: Edges at which the run starts.
        gradients: The gradients there, of the right shapes.
        mode: Whether the saved tensors of the nodes survive, and whether the run is recorded.

    Returns:
        A gradient for each of ``inputs``, or None if none arrives.
    """
    if not inputs or not edges:
        return [None] * len(inputs)
    retain, create = mode.retain_graph, mode.create_graph
    captured: tuple[Tensor | None, ...] = ENGINE.run_backward(
        tuple(edges), tuple(gradients), retain, create, tuple(inputs), True, accumulate_grad=False
    )
    return captured


def places_in(reached: Reached) -> tuple[list[GradientEdge], list[Any]]:
    """Returns the edges to places, leaves and receives whose gradients are wanted, and their keys.

    The key of a leaf is the leaf. The key of a stop's output, or of a passed output, is its place.
    Receives come last, without a key.
    """
    places, variables = [*reached.passed], list[Any](reached.passed)
    for node, leaf in reached.leaves.items():
        places += leaf.places if type(leaf) is Stop else [(node, 0)]
        variables += leaf.places if type(leaf) is Stop else [leaf]
    return [GradientEdge(*place) for place in places] + edges_at(reached.receives), variables


def run(
    reached: Reached,
    edges: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    mode: PassMode,
    sink: Sink,
) -> Sequence[Tensor | None]:
    """Runs the graph behind sends once; gives the gradients of its leaves to ``sink``.

    Args:
        reached: What the sends reach.
        edges: Edges at which the run starts.
        gradients: The gradients there.
        mode: How the pass is run.
        sink: Takes the gradients of leaves.

    Returns:
        The gradients of received tensors, None if there is none.
    """
    leaves = reached.leaves
    if reached.passed or Stop in map(type, leaves.values()):
        targets, variables = places_in(reached)
    else:
        targets, variables = edges_at([*leaves, *reached.receives]), [*leaves.values()]
    captured = gradients_at(targets, edges, gradients, mode)
    count = len(variables)
    if count:
        pairs = []
        for variable, gradient in zip(variables, captured, strict=False):
            if gradient is not None:
                pairs.append((variable, gradient))
        sink(pairs, [*gradients, *captured[count:]])
    return captured[count:]


def run_alone(
    reached: Reached,
    gradients: Sequence[Gradient],
    end_of: EndOf,
    sink: Sink,
    mode: PassMode,
) -> Collection[Answer] | None:
    """Runs the graph behind a send that shares no node with another send.

    Its nodes wait for nothing but its gradients. So one engine call does, or none at all where the
    sent tensors are leaves.

    Args:
        reached: The send, and the leaves and receives that it reaches.
        gradients: The gradients of the send.
        end_of: Where the graph ends.
        sink: Takes the gradients of leaves.
        mode: How the pass is run.

    Returns:
        The answers; None if nothing was run, since the engine cannot start at nodes without a
        gradient: see ``component.Component``.
    """
    (send,), leaves, receives, *_ = reached
    edges = send.edges
    given: list[Tensor] = []
    for gradient in gradients:
        if isinstance(gradient, Tensor):
            given.append(gradient)
    is_whole = len(given) == len(edges)
    if not is_whole:
        if any(gradient is UNDEFINED for gradient in gradients):
            return None
        both = zip(edges, gradients, strict=True)
        edges = tuple([edge for edge, gradient in both if gradient is not None])
    if not receives and len(leaves) <= len(edges) <= _FEW_LEAVES:
        pairs = _pairs_at_leaves(leaves, edges, given)
        if pairs is not None:
            sink(pairs, given)
            return ()
    captured = run(reached, edges, given, mode, sink)
    if not receives:
        return ()
    used = receives if is_whole else receives_behind(edges, end_of, set())
    return answers_of(receives, captured, mode.create_graph, used)


_FEW_LEAVES = 8
"""Up to so many sent leaves, a call of the engine takes longer than to look at each of them."""


def _pairs_at_leaves(
    leaves: Mapping[Node, Leaf], edges: Iterable[GradientEdge], gradients: Iterable[Tensor]
) -> list[tuple[Tensor, Tensor]] | None:
    """Returns the leaves at ``edges``; None if the engine has to convert or run something."""
    pairs = []
    for edge, gradient in zip(edges, gradients, strict=True):
        leaf = leaves.get(edge.node)
        if type(leaf) is Stop or leaf is None or has_hooks(leaf, edge.node):
            return None
        if leaf.dtype != gradient.dtype or leaf.shape != gradient.shape:
            return None
        pairs.append((leaf, gradient))
    return pairs


# Roots


class Roots(NamedTuple):
    """The start of a pass.

    Attributes:
        edges: Places in the graph.
        gradients: The gradient at each of them.
        kept: Keeps the graph alive, since an edge to a Python node does not.
    """

    edges: tuple[GradientEdge, ...]
    gradients: tuple[Tensor, ...]
    kept: object = None


def roots_of(
    tensors: Iterable[Tensor],
    gradients: Sequence[Tensor | None] | None = None,
    *,
    what: str = "root",
) -> Roots:
    """Returns tensors and their gradients as roots.

    Args:
        tensors: The tensors, which must require grad.
        gradients: The gradient at each of them; None means one, for a scalar.
        what: The name of a tensor in error messages.

    Raises:
        ArgumentTypeError: An item of ``tensors`` or ``gradients`` is not a tensor.
        AutogradError: A tensor cannot be backpropagated from, or a gradient does not fit.
    """
    checked = tuple(_listed(tensors, f"the {what}s"))
    if not checked:
        raise AutogradError(
            f"No tensors provided for gradient computation; backward needs at least one {what}"
        )
    is_given = gradients is not None
    given = _listed(gradients, f"the gradients for {what}s") if is_given else [None] * len(checked)
    if len(given) != len(checked):
        raise AutogradError(
            f"there are {len(given)} gradients for {len(checked)} {what}s; give one for each, "
            "None where it is a scalar"
        )
    found = tuple(map(_gradient_at, itertools.count(), checked, given, itertools.repeat(what)))
    return Roots(tuple(map(get_gradient_edge, checked)), found, checked)


def _listed(given: Any, name: str) -> list[Any]:
    try:
        return list(given)
    except TypeError as error:
        raise ArgumentTypeError(
            f"incompatible function arguments: {name} must be a list of tensors, not "
            f"{kind_of(given)}; for one tensor pass [tensor]"
        ) from error


def _check_differentiable(tensor: object, name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(
            f"incompatible function arguments: {name} is {kind_of(tensor)}, not a tensor"
        )
    if not tensor.requires_grad:
        raise AutogradError(
            f"{name} does not require grad (requires_grad not set on it); was it made "
            "under torch.no_grad(), or of tensors that do not require grad?"
        )


def _gradient_at(place: int, tensor: Tensor, gradient: Tensor | None, what: str) -> Tensor:
    _check_differentiable(tensor, f"{what} {place}")
    if gradient is None:
        if tensor.numel() != 1:
            raise AutogradError(
                f"{what} {place} has shape {tuple(tensor.shape)}; it is not a scalar, all {what}s "
                "need to be scalar: take a sum() or mean() first, or pass the gradient there"
            )
        return torch.ones_like(tensor)
    if not isinstance(gradient, Tensor):
        raise ArgumentTypeError(
            f"the gradient for {what} {place} is a {type(gradient).__name__}, not a tensor"
        )
    if gradient.shape != tensor.shape:
        raise AutogradError(
            f"the gradient for {what} {place} has shape {tuple(gradient.shape)}; the {what} has "
            f"{tuple(tensor.shape)}"
        )
    if gradient.is_complex() != tensor.is_complex():
        raise AutogradError(
            f"the gradient for {what} {place} is {gradient.dtype}; the {what} is {tensor.dtype}"
        )
    return gradient


# Inputs


class InputGradients:
    """Collects the gradients at some places, over as many passes as needed.

    Args:
        context: This worker's records.
        inputs: Tensors of this worker that require grad.
        replaced: Replacement tensors, from which to continue, by the places they replace.
        for_inputs: Whether only the gradients of ``inputs`` are wanted.

    Attributes:
        stops: The nodes at which passes end.
        goes_on: Whether more than one pass is needed.
        cuts: The replaced nodes that this worker computed. The engine must be kept from them: it
            runs through a node if any target lies behind it.
        passed: The places of inputs that passes go through.
        ends: Where walks end on this worker: at the stops, and at received messages.
        first_send: How many messages were sent before the first that leads to an input.
    """

    def __init__(
        self,
        context: Context,
        inputs: Sequence[Tensor],
        replaced: Mapping[Place, Tensor] | None = None,
        for_inputs: bool = True,
    ) -> None:
        # Keep the tensors: edges to Python nodes do not keep the graph alive.
        self._inputs = inputs
        self._replaced = replaced or {}
        self.goes_on = bool(replaced)
        self._places = [place_of(tensor) for tensor in inputs]
        self._gradients: dict[Place, Tensor] = {}
        receive_of, sends = dict(context.receive_of), context.sends()
        # A sum may be captured in parts; a hook must see the whole.
        hooked = {place_of(tensor)[0] for tensor in inputs if tensor._backward_hooks}
        stops = {node: Stop(node, node in hooked) for node, _ in self._places}
        self.first_send = _first_to(stops, sends, receive_of.get) if for_inputs else 0
        self._nexts = _nexts_across(receive_of, sends, self.first_send)
        through = self._with_others_behind(stops)
        self.passed = [place for place in dict.fromkeys(self._places) if place[0] in through]
        self._kept = stops.keys() | {node for node, _ in self._replaced}
        self.stops = {node: stop for node, stop in stops.items() if node not in through}
        self.stops.update((node, Stop(node, False)) for node, _ in self._replaced)
        self.cuts = {node for node, _ in self._replaced if node not in receive_of}
        self.ends: dict[Node, End] = {
            node: receive
            for node, receive in receive_of.items()
            if receive.sends_before > self.first_send or not for_inputs
        }
        self.ends.update(self.stops)

    def _with_others_behind(self, nodes: Collection[Node]) -> set[Node]:
        """Returns the members of ``nodes`` that may lead to other members."""
        nexts = self._nexts
        seeds = [target for node in nodes for target in nexts(node)]
        if not any(node in nodes for node in walk(seeds, set(), nexts)):
            return set()
        return {
            node
            for node in nodes
            if any(target in nodes for target in walk(nexts(node), set(), nexts))
        }

    def sink_beside(self, sink: Sink) -> Sink:
        """Returns a sink that keeps the captured gradients and passes all others to ``sink``."""

        def add_all(pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[object]) -> None:
            others = []
            for key, gradient in pairs:
                place = place_of(key) if isinstance(key, Tensor) else key
                if place[0] not in self._kept:
                    others.append((key, gradient))
                    continue
                earlier = self._gradients.get(place)
                gradient = gradient if earlier is None else sum_of(earlier, gradient)
                self._gradients[place] = gradient
            if others:
                sink(others, borrowed)

        return add_all

    def further_roots(self) -> Iterator[Roots]:
        """Yields the roots of each further pass."""
        pending = {node for node, _ in self._replaced}
        behind = {
            node: set(walk(self._nexts(node), set(), self._nexts)) & pending for node in pending
        }
        while pending:
            # No pending node leads to these, so their gradients are complete.
            nodes = pending.difference(*[behind[node] for node in pending])
            assert nodes, "a graph leads to what was there before it"
            pending -= nodes
            given = [place for place in self._gradients if place[0] in nodes]
            if given:
                gradients = tuple([self._gradients[place] for place in given])
                edges = tuple([get_gradient_edge(self._replaced[place]) for place in given])
                yield Roots(edges, gradients, (self._inputs, self._replaced))

    def results(self) -> list[Tensor | None]:
        """Returns the gradient of each input, or None."""
        return [self._gradients.get(place) for place in self._places]


Nexts = Callable[[Node], Iterable[Node]]


def _nexts_across(
    receive_of: Mapping[Node, ReceiveRecord], sends: Sequence[SendRecord], first_send: int = 0
) -> Nexts:
    """Returns a function that gives a node's successors, also by way of other workers.

    Args:
        receive_of: The messages that this worker received, by their placeholders.
        sends: Those that it sent. A received message leads to those that were sent before it.
        first_send: How many of the first sent messages lead nowhere.
    """

    def nexts(node: Node) -> Iterable[Node]:
        receive = receive_of.get(node)
        if receive is None:
            return next_nodes(node)
        before = sends[first_send : receive.sends_before]
        return [edge.node for send in before for edge in send.edges]

    return nexts


def _first_to(wanted: Container[Node], sends: Sequence[SendRecord], end_of: EndOf) -> int:
    """Returns how many messages were sent before the first that leads to a node in ``wanted``."""
    visited: set[Node] = set()
    for place, send in enumerate(sends):
        if any(node in wanted for node in walk_here(send.edges, visited, end_of)):
            return place
    return len(sends)


def receives_before(context: Context, roots: Roots) -> list[ReceiveRecord]:
    """Returns the received messages to which roots may lead, also by way of other workers."""
    receive_of = dict(context.receive_of)
    nexts = _nexts_across(receive_of, context.sends())
    nodes = walk([edge.node for edge in roots.edges], set(), nexts)
    return [receive_of[node] for node in nodes if node in receive_of]


def place_of(tensor: Tensor) -> Place:
    """Returns where in the graph a tensor is."""
    node, output_nr, *_ = get_gradient_edge(tensor)
    return node, output_nr


def checked_inputs(inputs: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Returns the tensors whose gradients are wanted, as a list.

    Raises:
        ArgumentTypeError: An input is not a tensor.
        AutogradError: There are no inputs, or one does not require grad.
    """
    if isinstance(inputs, Tensor):
        inputs = [inputs]
    checked = _listed(inputs, "the inputs")
    if not checked:
        raise AutogradError(
            "'inputs' argument cannot be empty: pass the tensors whose gradients you want"
        )
    for place, tensor in enumerate(checked):
        _check_differentiable(tensor, f"inputs[{place}]")
    return checked


def all_used(found: Sequence[Tensor | None], allow_unused: bool) -> tuple[Tensor, ...]:
    """Returns gradients of inputs as a tuple.

    Raises:
        AutogradError: A gradient is None without ``allow_unused``.
    """
    for place, gradient in enumerate(found):
        if gradient is None and not allow_unused:
            raise AutogradError(
                f"One of the differentiated Tensors appears to not have been used in the graph: "
                f"inputs[{place}]; pass allow_unused=True if None is what you want for it"
            )
    return tuple(found)  # type: ignore[arg-type]


def check_context_id(context_id: int) -> None:
    """Raises ArgumentTypeError if ``context_id`` is not an integer."""
    try:
        operator.index(context_id)
    except TypeError:
        raise ArgumentTypeError(
            f"incompatible function arguments: context_id is {kind_of(context_id)}; pass the "
            "number that 'with torchweft.autograd.context() as context_id' gives"
        ) from None
