"""The gradients of certain tensors, and of nothing else: what ``grad`` asks of a pass.

A pass that wants them need not go on behind these tensors, unless others of them are there. What
is there is not known here as a whole: the graph goes through other workers. But whatever comes
back from another worker comes through a message that this one sent, and before it received the
one through which the way leads on: messages that were sent later cannot matter. So it is enough
to look at the graph of this worker, and at the order of its messages; that errs on the side of
taking a way for one that leads to a tensor.

Rules of the file: a pass ends at all tensors that are asked for. Where others are behind one, a
pass of its own goes on from there, when its gradient is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from weft.autograd.contexts import Context, ReceiveRecord, SendRecord
from weft.autograd.gradients import sum_of
from weft.autograd.roots import Roots
from weft.autograd.walk import End, Stop
from weft.errors import ArgumentTypeError, AutogradError

Place = tuple[Node, int]


class Captures:
    """Collects the gradients of some tensors over the passes that are needed for it.

    Args:
        context: What this worker has recorded.
        inputs: Tensors of this worker that require grad.

    Attributes:
        stops: The nodes that the tensors are outputs of.
        ends: Where a pass ends on this worker: at these, and at received messages that may lead
            to them.
    """

    def __init__(self, context: Context, inputs: Sequence[Tensor]) -> None:
        # Edges to Python nodes alone do not keep the graph alive.
        self._inputs = inputs
        self._receive_of = dict(context.receive_of)
        self._sends = context.sends()
        edges = [get_gradient_edge(tensor) for tensor in inputs]
        self._places: list[Place] = [(edge.node, edge.output_nr) for edge in edges]
        self._gradients: dict[Place, Tensor] = {}
        self.stops = _stops_at(self._places, inputs)
        self._first_send = self._first_leading_send()
        self._behind = self._find_behind()
        self.ends: Mapping[Node, End] = self._ends_without(None)

    def _ends_without(self, stop: Node | None) -> dict[Node, End]:
        ends: dict[Node, End] = {
            node: receive for node, receive in self._receive_of.items() if self._leads_on(receive)
        }
        ends.update(self.stops)
        if stop is not None:
            del ends[stop]
            receive = self._receive_of.get(stop)
            if receive is not None:
                ends[stop] = receive
        return ends

    def _leads_on(self, receive: ReceiveRecord) -> bool:
        return receive.sends_before > self._first_send

    def _first_leading_send(self) -> int:
        """Returns the place of the first message from which a tensor is reached on this worker."""
        visited: set[Node] = set()
        for place, send in enumerate(self._sends):
            if any(node in self.stops for node in _walk(_nodes_of(send), visited, self._nexts)):
                return place
        return len(self._sends)

    def _nexts(self, node: Node) -> Iterable[Node]:
        """Returns what ``node`` leads to on this worker, before the next message."""
        return () if node in self._receive_of else _next_nodes(node)

    def _nexts_anywhere(self, node: Node) -> Iterable[Node]:
        """Returns what ``node`` may lead to, also by way of other workers."""
        receive = self._receive_of.get(node)
        if receive is None:
            return _next_nodes(node)
        sends = self._sends[self._first_send : receive.sends_before]
        return [target for send in sends for target in _nodes_of(send)]

    def _find_behind(self) -> dict[Node, set[Node]]:
        """Returns, for each tensor behind which there are others, which these may be."""
        seeds = [target for node in self.stops for target in self._nexts_anywhere(node)]
        if self.stops.keys().isdisjoint(_walk(seeds, set(), self._nexts_anywhere)):
            return {}
        found: dict[Node, set[Node]] = {}
        for node in self.stops:
            reached = set(_walk(self._nexts_anywhere(node), set(), self._nexts_anywhere))
            found[node] = reached & self.stops.keys() - {node}
        return {node: behind for node, behind in found.items() if behind}

    @property
    def is_complete(self) -> bool:
        """Whether one pass from the outputs is all that is needed."""
        return not self._behind

    def add(self, pairs: Iterable[tuple[object, Tensor]], borrowed: Iterable[Tensor]) -> None:
        """Takes gradients of one engine call."""
        for place, gradient in pairs:
            self._add(place, gradient)  # type: ignore[arg-type]

    def _add(self, place: Place | Tensor, gradient: Tensor) -> None:
        if isinstance(place, Tensor):
            edge = get_gradient_edge(place)
            place = (edge.node, edge.output_nr)
        earlier = self._gradients.get(place)
        self._gradients[place] = gradient if earlier is None else sum_of(earlier, gradient)

    def further_roots(self) -> Iterator[Roots]:
        """Yields where to go on, pass by pass; ``ends`` is for the pass that is to be run."""
        pending = dict(self._behind)
        while pending:
            # Whatever leads to it has added to its gradient before.
            node = next(
                node
                for node in pending
                if not any(node in behind for other, behind in pending.items() if other != node)
            )
            del pending[node]
            found = [(place, self._gradients.get(place)) for place in self.stops[node].places]
            given = [(place, gradient) for place, gradient in found if gradient is not None]
            if not given:
                continue
            self.ends = self._ends_without(node)
            yield Roots(
                tuple([GradientEdge(*place) for place, _ in given]),
                tuple([gradient for _, gradient in given]),
                self._inputs,
            )

    def results(self) -> list[Tensor | None]:
        """Returns the gradient of each tensor; None where there is none."""
        return [self._gradients.get(place) for place in self._places]


def _stops_at(places: Iterable[Place], inputs: Iterable[Tensor]) -> dict[Node, Stop]:
    hooked = {
        node
        for (node, _), tensor in zip(places, inputs, strict=True)
        if tensor._backward_hooks  # Unlike a sum, they must not be called on parts.
    }
    return {node: Stop(node, node in hooked) for node, _ in places}


def _nodes_of(send: SendRecord) -> list[Node]:
    return [edge.node for edge in send.edges]


def _next_nodes(node: Node) -> list[Node]:
    return [target for target, _ in node.next_functions if target is not None]


def _walk(seeds: Iterable[Node], visited: set[Node], nexts: object) -> Iterator[Node]:
    """Yields all nodes that ``seeds`` lead to, with them, as far as not in ``visited``."""
    stack = list(seeds)
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        yield node
        stack.extend(nexts(node))  # type: ignore[operator]


def checked_inputs(inputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors whose gradients are wanted, as a list.

    Raises:
        ArgumentTypeError: Something is no tensor.
        AutogradError: There are none, or one does not require grad.
    """
    if isinstance(inputs, Tensor):
        return checked_inputs([inputs])
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
