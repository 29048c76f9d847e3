"""The tensors that a program names for a pass: its roots, and for ``grad`` the inputs.

A pass for certain inputs may stop at an input unless another input lies upstream. No worker sees
the whole graph. But consider a path that leaves by a received message and returns from another
worker. It returns through a message that this worker sent before it received that one. Later
messages cannot matter, so this worker's graph and the order of its messages suffice. The result is
conservative: it may report a path to an input where there is none.

Rules of the file: a pass ends at an input, or goes through it if other inputs may lie upstream.
It also ends at a replaced result, whose graph was lost with a worker: when the gradient there is
complete, another pass continues from the replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from torchweft.arguments import kind_of
from torchweft.autograd.contexts import Context
from torchweft.autograd.gradients import Sink, sum_of
from torchweft.autograd.records import ReceiveRecord, SendRecord
from torchweft.autograd.walk import End, Place, Stop, next_nodes, walk
from torchweft.errors import ArgumentTypeError, AutogradError

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
    checked = _checked(tensors, what)
    if gradients is None:
        given = tuple([_one_at(place, tensor, what) for place, tensor in enumerate(checked)])
    else:
        given = _checked_gradients(checked, gradients, what)
    return Roots(tuple(map(get_gradient_edge, checked)), given, checked)


def _checked(tensors: Iterable[Tensor], what: str) -> tuple[Tensor, ...]:
    try:
        checked = tuple(tensors)
    except TypeError as error:
        raise ArgumentTypeError(
            f"incompatible function arguments: the {what}s must be a list of tensors, "
            f"not {kind_of(tensors)}; for one loss pass [loss]"
        ) from error
    if not checked:
        raise AutogradError(
            f"No tensors provided for gradient computation; backward needs at least one {what}"
        )
    for place, tensor in enumerate(checked):
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(
                f"incompatible function arguments: {what} {place} is {kind_of(tensor)}, "
                "not a tensor"
            )
        if not tensor.requires_grad:
            raise AutogradError(
                f"{what} {place} does not require grad (requires_grad not set on it); was it made "
                "under torch.no_grad(), or of tensors that do not require grad?"
            )
    return checked


def _checked_gradients(
    tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], what: str
) -> tuple[Tensor, ...]:
    try:
        gradients = list(gradients)
    except TypeError as error:
        raise ArgumentTypeError(
            f"the gradients for {what}s are a {type(gradients).__name__}; pass a list of tensors, "
            f"one for each {what}, or a tensor where there is one {what}"
        ) from error
    if len(gradients) != len(tensors):
        raise AutogradError(
            f"there are {len(gradients)} gradients for {len(tensors)} {what}s; give one for each, "
            "None where it is a scalar"
        )
    pairs = zip(tensors, gradients, strict=True)
    return tuple([_gradient(place, *pair, what) for place, pair in enumerate(pairs)])


def _one_at(place: int, tensor: Tensor, what: str) -> Tensor:
    if tensor.numel() != 1:
        raise AutogradError(
            f"{what} {place} has shape {tuple(tensor.shape)}; it is not a scalar, all {what}s "
            "need to be scalar: take a sum() or mean() first, or pass the gradient there"
        )
    return torch.ones_like(tensor)


def _gradient(place: int, tensor: Tensor, gradient: Tensor | None, what: str) -> Tensor:
    if gradient is None:
        return _one_at(place, tensor, what)
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
        self._places = [place_of(tensor) for tensor in inputs]
        self._gradients: dict[Place, Tensor] = {}
        self._graph = _History(context)
        stops = _stops_at(self._places, inputs)
        self.first_send = self._graph.first_send_to(stops) if for_inputs else 0
        self._nexts = self._graph.nexts_after(self.first_send)
        through = self._with_others_behind(stops)
        self.passed = [place for place in dict.fromkeys(self._places) if place[0] in through]
        self._kept = stops.keys() | {node for node, _ in self._replaced}
        self.stops = {node: stop for node, stop in stops.items() if node not in through}
        self.stops.update((node, Stop(node, False)) for node, _ in self._replaced)
        self.cuts = {node for node, _ in self._replaced if node not in self._graph.receive_of}
        self.ends: dict[Node, End] = {
            node: receive
            for node, receive in self._graph.receive_of.items()
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

    @property
    def goes_on(self) -> bool:
        """Whether more than one pass is needed."""
        return bool(self._replaced)

    def sink_beside(self, sink: Sink) -> Sink:
        """Returns a sink that keeps the captured gradients and passes all others to ``sink``."""

        def add_all(pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[Tensor]) -> None:
            others = []
            for key, gradient in pairs:
                place = place_of(key) if isinstance(key, Tensor) else key
                if place[0] in self._kept:
                    self._add(place, gradient)
                else:
                    others.append((key, gradient))
            if others:
                sink(others, borrowed)

        return add_all

    def _add(self, place: Place, gradient: Tensor) -> None:
        earlier = self._gradients.get(place)
        self._gradients[place] = gradient if earlier is None else sum_of(earlier, gradient)

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


class _History:
    """One worker's knowledge of the graph of a context.

    Args:
        context: The worker's records.
    """

    def __init__(self, context: Context) -> None:
        self.receive_of: dict[Node, ReceiveRecord] = dict(context.receive_of)
        self._sends = context.sends()

    def first_send_to(self, wanted: Collection[Node]) -> int:
        """Returns how many messages were sent before the first that leads to one of ``wanted``."""
        visited: set[Node] = set()
        for place, send in enumerate(self._sends):
            nodes = walk(_nodes_of(send), visited, self._nexts_here)
            if any(node in wanted for node in nodes):
                return place
        return len(self._sends)

    def _nexts_here(self, node: Node) -> Iterable[Node]:
        """Returns the nodes that ``node`` leads to on this worker, without following messages."""
        return () if node in self.receive_of else next_nodes(node)

    def nexts_after(self, first_send: int) -> Callable[[Node], Iterable[Node]]:
        """Returns a function that gives a node's successors, also by way of other workers.

        Args:
            first_send: How many of the first sent messages to ignore.
        """

        def nexts(node: Node) -> Iterable[Node]:
            receive = self.receive_of.get(node)
            if receive is None:
                return next_nodes(node)
            sends = self._sends[first_send : receive.sends_before]
            return [target for send in sends for target in _nodes_of(send)]

        return nexts


def receives_before(context: Context, roots: Roots) -> list[ReceiveRecord]:
    """Returns the received messages to which roots may lead, also by way of other workers."""
    history = _History(context)
    nodes = walk([edge.node for edge in roots.edges], set(), history.nexts_after(0))
    return [history.receive_of[node] for node in nodes if node in history.receive_of]


def place_of(tensor: Tensor) -> Place:
    """Returns where in the graph a tensor is."""
    node, output_nr, *_ = get_gradient_edge(tensor)
    return node, output_nr


def _stops_at(places: Iterable[Place], inputs: Iterable[Tensor]) -> dict[Node, Stop]:
    hooked = {
        node
        for (node, _), tensor in zip(places, inputs, strict=True)
        if tensor._backward_hooks  # A sum may be captured in parts; a hook must see the whole.
    }
    return {node: Stop(node, node in hooked) for node, _ in places}


def _nodes_of(send: SendRecord) -> list[Node]:
    return [edge.node for edge in send.edges]


def checked_inputs(inputs: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Returns the tensors whose gradients are wanted, as a list.

    Raises:
        ArgumentTypeError: An input is not a tensor.
        AutogradError: There are no inputs, or one does not require grad.
    """
    if isinstance(inputs, Tensor):
        inputs = [inputs]
    try:
        checked = list(inputs)
    except TypeError as error:
        raise ArgumentTypeError(
            f"inputs is a {type(inputs).__name__}; pass a tensor or a list of tensors"
        ) from error
    if not checked:
        raise AutogradError(
            "'inputs' argument cannot be empty: pass the tensors whose gradients you want"
        )
    for place, tensor in enumerate(checked):
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(f"inputs[{place}] is a {type(tensor).__name__}, not a tensor")
        if not tensor.requires_grad:
            raise AutogradError(
                f"One of the differentiated Tensors does not require grad: inputs[{place}], of "
                f"shape {tuple(tensor.shape)}; call requires_grad_() on it before it is used"
            )
    return checked
