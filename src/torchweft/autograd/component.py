"""Runs the graph behind live sends in torch's engine, once their gradients have arrived.

``Component`` runs sends that share nodes, when all their gradients are there. ``GatedRun`` runs
components that wait for themselves. The usual case, a send that shares no node with another, is
``graph.run_alone``. The rules and their proofs are in ``docs/protocols/autograd.md``.

The problem: in ``h = remote(b) + b`` the gradient of ``b`` is a sum. One part comes out of the
graph of this worker, the other one in a message that is sent only after this worker has run the
graph behind ``h``: the component *waits for itself*. Two runs of the engine would run the graph
behind ``b`` on parts of its gradients, or once for each part.

The idea: one run, in which a gate takes the place of the missing gradient. A gate is the node of
an alias of a sent tensor, made when the message was sent. A run that has to wait starts at the gate
too, with zeros that take no memory. A hook of the gate then waits, and puts the gradients that have
come in the place of the zeros. Gradients of received messages leave the run as soon as they are
complete; the thread in a gate sends them, and takes messages. The engine runs ready nodes in
descending order of their sequence numbers. Gates have the lowest, those of earlier messages lower
ones. So all that is ready has run when a gate waits, and it waits for the latest message, which no
other one that is missing can wait for. All such components of this worker run in one call, since
one may wait for what another answers.

Rules of the file: in a run with gates the engine must run all nodes in the calling thread, in one
queue. A node may run in several runs at once, of a graph that is retained; each run knows its gates
by their zeros.
"""

from __future__ import annotations

import contextlib
import threading
from _thread import get_ident
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchweft.autograd import hooks
from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import (
    TAKE,
    UNDEFINED,
    Gradient,
    ReceiveRecord,
    SendRecord,
    Sink,
    hooks_at,
)
from torchweft.autograd.graph import (
    ENGINE,
    Answer,
    EndOf,
    Leaf,
    Reached,
    answers_of,
    has_hooks,
    note_reached,
    receives_behind,
    run,
)
from torchweft.engine.protocol.backward import Progress
from torchweft.engine.threads import device_streams
from torchweft.errors import ProtocolError, WeftError
from torchweft.ids import WORKER_SHIFT


def accumulate(
    tensors: tuple[Any, ...], gradients: tuple[Tensor, ...], leaves: tuple[Tensor, ...] = ()
) -> None:
    """Runs the graph behind tensors, and adds to ``.grad`` of its leaves. The graph is freed.

    Runs the hooks of the leaves and of the accumulating nodes; the latter wait for collectives.

    Args:
        tensors: Tensors or edges at which the run starts; a leaf gets its gradient itself.
        gradients: The gradients there, of the right shapes.
        leaves: The leaves that get a gradient; all if empty.
    """
    ENGINE.run_backward(tensors, gradients, False, False, leaves, True, accumulate_grad=True)


OF_TORCH = "an operation of torch"
"""The operation of an error if it is no function of the user."""


def operation_of(error: BaseException) -> str:
    """Returns the name of the user's function whose backward raised ``error``.

    torch does not report which of its own operations failed; its message usually does.
    """
    is_weft = isinstance(error, WeftError)
    name = "exchanging gradients" if is_weft else OF_TORCH
    step: TracebackType | None = error.__traceback__
    while step is not None:
        for value in list(step.tb_frame.f_locals.values()):
            if isinstance(value, torch._C._FunctionBase):
                name = type(value).__name__.removesuffix("Backward") + ".backward"
        step = step.tb_next
    return name


# Runs that wait


class _Probing(threading.local):
    """The run of the engine in a thread whose probes are to take gradients, if any."""

    run: object = None


probing = _Probing()


@contextlib.contextmanager
def probed_by(run: object) -> Iterator[None]:
    """Has only the probes of a run take gradients in this thread, within a ``with`` block.

    A hook may begin another pass through the same graph; None stands for such a pass.
    """
    before, probing.run = probing.run, run
    try:
        yield
    finally:
        probing.run = before


_registering = threading.Lock()
"""Held while hooks of a gate are registered: two threads that are the first to do so would give the
gate two tables of hooks, the second one while a run of the first thread may be looking at them."""


class Start(contextlib.ExitStack):
    """Where one run of the engine starts; a ``with`` block around the run.

    Attributes:
        edges: Edges and gates at which it starts.
        gradients: The gradients there; at a gate, zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.edges: list[GradientEdge] = []
        self.gradients: list[Tensor] = []
        self._is_in_one_thread = False

    def open(self, gate: Any, take: Callable[[], Tensor | None]) -> None:
        """Has the run start at a gate too.

        Args:
            gate: The gate.
            take: Returns its gradient, or None for an undefined one; may block.
        """
        self._run_in_one_thread()
        meta = gate._input_metadata[0]
        zeros = torch.zeros((), dtype=meta.dtype, device=meta.device).expand(meta.shape)
        self.edges.append(GradientEdge(gate, 0))
        self.gradients.append(zeros)
        if isinstance(gate, torch._C._FunctionBase):
            setattr(zeros, TAKE, take)
        else:
            with _registering:
                handle = gate.register_prehook(partial(_replace, zeros, take))
            self.callback(handle.remove)

    def cut(self, nodes: Iterable[Node]) -> None:
        """Has nodes get no gradient in runs of this thread.

        The engine runs a node if any target lies behind it, also if it has captured the gradient
        there.
        """
        thread = get_ident()

        def take_away(incoming: tuple[Any, ...]) -> tuple[None, ...] | None:
            return (None,) * len(incoming) if get_ident() == thread else None

        for node in nodes:
            self._run_in_one_thread()
            self.callback(node.register_prehook(take_away).remove)

    def probe(self, node: Node, take: Callable[[Tensor | None], None], run: object) -> None:
        """Tells of the gradient of a received tensor, after all hooks of the tensor.

        Unlike a hook of the node, it is called also if the engine ends there.

        Args:
            node: The placeholder of the tensor.
            take: Called with the gradient, or None for an undefined one.
            run: The run. In others of the same node, ``take`` is not called; see ``probed_by``.
        """

        def see(gradient: Tensor | None) -> None:
            if probing.run is run:
                take(gradient)

        table = hooks_at(node)
        table[see] = see
        self.callback(table.pop, see, None)

    def _run_in_one_thread(self) -> None:
        # Otherwise nodes of other devices run in a thread for each device, which all passes share.
        if not self._is_in_one_thread:
            self._is_in_one_thread = True
            self.enter_context(torch.autograd.set_multithreading_enabled(False))


def _replace(
    zeros: Tensor, take: Callable[[], Tensor | None], incoming: tuple[Tensor | None, ...]
) -> tuple[Tensor | None] | None:
    """Puts the gradient of a gate in the place of the zeros of its run."""
    if incoming[0] is not zeros:
        return None
    gradient = take()
    if gradient is not None and gradient.layout is not torch.strided:
        gradient = gradient.to_dense()  # A hook may not change the layout.
    return (gradient,)


# Order

_ORDINARY = 1 << 60
"""Added to the sequence numbers of ordinary nodes."""
_COUNTER = (1 << WORKER_SHIFT) - 1


def put_last(gates: Iterable[tuple[int, Node]], others: Iterable[Any]) -> None:
    """Has the engine run gates only if no other node is ready, the latest message's first.

    The numbers are the same in each run of a gate or a node, since runs may take place at once.

    Args:
        gates: The gates, with the numbers of their messages. A worker counts its messages.
        others: All other nodes of the run. Each thread numbers its nodes by itself, so one of
            them may have any number; their order among each other stays.
    """
    for message_id, gate in gates:
        gate._set_sequence_nr(message_id & _COUNTER)  # type: ignore[attr-defined]
    for node in others:
        number = node._sequence_nr()
        if number < _ORDINARY:
            node._set_sequence_nr(number + _ORDINARY)


# Components


class Component:
    """Sends that share nodes or placeholders, and the graph that they reach.

    The worker learns only gradually which sends are live, and which of their tensors. Nothing of
    the component runs until all its sends are known to be live, or the pass has settled that the
    others are not.

    Args:
        reached: The sends, live or not, and the leaves and receives that they reach together.
        end_of: Where the graph ends.
        sink: Takes the gradients of leaves.
        mode: How the pass is run.
        answers_all: Whether each tensor of a message gets a gradient, also an unused one.
    """

    def __init__(
        self,
        reached: Reached,
        end_of: EndOf,
        sink: Sink,
        mode: PassMode,
        answers_all: bool = False,
    ) -> None:
        self.reached = reached
        """The sends, and the leaves and receives that they reach together."""
        self.mode = mode
        self._end_of = end_of
        self._sink = sink
        self._answers_all = answers_all
        self._send_of = {send.message_id: send for send in reached.sends}
        self._live: dict[int, int] = {}
        """By message, the live tensors of each live send, as bits."""
        self.given: dict[int, list[Gradient]] = {}
        """By message, the gradients that have come."""
        self._marks: dict[int, Any] = {}
        self._news: list[tuple[int, int]] = []
        self._noted_in_part: set[int] = set()
        self._visited: set[Node] = set()
        self.live_receives: dict[Node, ReceiveRecord] = {}
        """Received messages by the placeholders that live tensors reach; set by ``advance``."""
        self.is_finished = False
        """Whether everything has run."""
        self.is_in_gates = False
        """Whether a ``GatedRun`` runs it."""

    def _whole(self, message_id: int) -> int:
        """Returns all tensors of a send, as bits."""
        return (1 << len(self._send_of[message_id].edges)) - 1

    def announce(self, message_id: int, tensors: int | None = None) -> None:
        """Notes that a send is live.

        Args:
            message_id: The send.
            tensors: Its live tensors, as bits; by default all of them.

        Raises:
            ProtocolError: If it has fewer tensors.
        """
        whole = self._whole(message_id)
        if tensors is None:
            tensors = whole
        elif tensors & ~whole:
            raise ProtocolError(f"message {message_id} has fewer tensors than were announced")
        elif message_id not in self._live:
            self._noted_in_part.add(message_id)
        self._announce(message_id, tensors)

    def _announce(self, message_id: int, tensors: int) -> None:
        earlier = self._live.get(message_id)
        if earlier is None or tensors & ~earlier:
            self._live[message_id] = tensors | (earlier or 0)
            self._news.append((message_id, tensors & ~(earlier or 0)))

    def arrive(self, message_id: int, gradients: Iterable[Gradient]) -> None:
        """Takes the gradients of one send, which is live.

        Raises:
            ProtocolError: If they came before.
        """
        if message_id in self.given:
            raise not_due(message_id)
        given = self.given[message_id] = list(gradients)
        if device_streams.HAS_CUDA:
            self._marks[message_id] = device_streams.mark()
        bits = sum([1 << at for at, gradient in enumerate(given) if gradient is not None])
        if message_id in self._noted_in_part:
            self._news.append((message_id, 0))  # It is complete now.
        self._announce(message_id, bits)

    @property
    def has_more_to_run(self) -> bool:
        """Whether gradients of some send have come, or are being awaited in a run."""
        return not self.is_finished and (self.is_in_gates or bool(self.given))

    def advance(self, is_settled: bool, progress: Progress) -> list[Answer]:
        """Runs everything, once all gradients of live sends are there and it is known.

        Args:
            is_settled: Whether all live sends have been announced.
            progress: Receives the progress of messages that results, except the answers.
        """
        if self.is_finished:
            return []
        found = self._note_walks(progress)
        if self.is_in_gates:
            return []
        answers: list[Answer] = []
        count = len(self.given)
        if count == len(self._send_of) or (is_settled and count == len(self._live)):
            answers = self._run()
            self.finish(progress)
        if found:
            answered = {receive.message_id for receive, _ in answers}
            note_reached(progress, found, answered, self._answers_all)
        return answers

    def _note_walks(self, progress: Progress) -> dict[Node, ReceiveRecord]:
        """Notes the sends walked from since the last call; returns the placeholders they reach."""
        news, self._news = self._news, []
        parts: dict[int, int] = {}
        for message_id, _ in news:
            progress.walked.append(message_id)
            if message_id in self._noted_in_part:
                is_complete = message_id in self.given
                parts[message_id] = (
                    self._whole(message_id) if is_complete else self._live[message_id]
                )
        if parts:
            progress.add_parts(parts, {})
        found = self._newly_reached(news) if news else {}
        self.live_receives.update(found)
        return found

    def _newly_reached(self, news: Sequence[tuple[int, int]]) -> dict[Node, ReceiveRecord]:
        receives, live = self.reached.receives, self._live
        if not receives:
            return {}
        if not self._visited and all(live.get(each) == self._whole(each) for each in self._send_of):
            return receives
        edges = [
            edge
            for message_id, tensors in news
            for at, edge in enumerate(self._send_of[message_id].edges)
            if tensors >> at & 1
        ]
        return receives_behind(edges, self._end_of, self._visited)

    def finish(self, progress: Progress) -> None:
        """Notes that everything has run."""
        self.is_finished = True
        self.given = {each: [] for each in self.given}  # The part may stay until its context ends.
        progress.executed += [each for each in self._send_of if each in self._live]

    def waits_for_itself(self, place_of: Mapping[int, int]) -> bool:
        """Returns whether a missing gradient may depend on a message that this component answers.

        Args:
            place_of: The place of each message that was sent in the context, in their order.
        """
        latest = 0
        for receive in self.live_receives.values():
            if receive.is_outside:  # Nothing is known of its order.
                latest = len(place_of)
                break
            latest = max(latest, receive.sends_before)
        missing = self._live.keys() - self.given.keys()
        return any(place_of.get(message_id, -1) < latest for message_id in missing)

    # Running

    def _run(self) -> list[Answer]:
        # Received messages that no live send reaches are not awaited.
        live = {record.message_id for record in self.live_receives.values()}
        found = self.reached.receives.items()
        receives = {node: record for node, record in found if record.message_id in live}
        with Start() as start:
            self.add_to(start)
            start.cut(self.reached.cuts)
            reached = self.reached._replace(receives=receives)
            captured = run(reached, start.edges, start.gradients, self.mode, self._sink)
        return answers_of(receives, captured, self.mode.create_graph, self.live_receives)

    def add_to(self, start: Start) -> None:
        """Has a run start at the gradients that are there, and at gates for undefined ones.

        The engine cannot start at a node without a gradient.
        """
        for message_id, given in self.given.items():
            send = self._send_of[message_id]
            if device_streams.HAS_CUDA:  # Another thread may have received some.
                device_streams.use(self._marks[message_id], given)
            for at, gradient in enumerate(given):
                if isinstance(gradient, Tensor):
                    start.edges.append(send.edges[at])
                    start.gradients.append(gradient)
                elif gradient is UNDEFINED:
                    start.open(send.gates[at], _nothing)

    def missing(self) -> Iterator[tuple[SendRecord, int]]:
        """Yields the live tensors whose gradients have not come: their sends, and places there."""
        for message_id in [each for each in self._live if each not in self.given]:
            send = self._send_of[message_id]
            for at in range(len(send.edges)):
                if self._live[message_id] >> at & 1:
                    yield send, at

    def take_gradient(self, message_id: int, at: int) -> Gradient:
        """Takes out the gradient of a tensor of a send; None if none of the send has come."""
        given = self.given.get(message_id)
        if given is None:
            return None
        gradient = given[at]
        if gradient is None:
            raise ProtocolError(
                f"no gradient came for tensor {at} of message {message_id}, which had been "
                "announced"
            )
        if device_streams.HAS_CUDA:
            device_streams.use(self._marks[message_id], given)
        given[at] = UNDEFINED  # Not kept until the end of the run.
        return gradient


def _nothing() -> None:
    """Returns an undefined gradient."""


def not_due(message_id: int) -> ProtocolError:
    """Returns the error for gradients that came before."""
    return ProtocolError(f"gradients of message {message_id} came without being due")


# In gates


class PassEnded(BaseException):
    """Ends a run of torch's engine from within a gate; the pass is over on this worker.

    Args:
        error: Why the thread cannot wait any longer; None if the pass knows.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error


class GatedRun:
    """One run of components that wait for themselves, once all live sends are known.

    Args:
        components: The components.
        nodes: Their nodes.
        sink: Takes the gradients of leaves.
        mode: How the pass is run.
        wait: Sends ``take_answers``, and takes messages; blocks until there are some. Called again
            while the gradients of a send are missing, which it gets the number of.
    """

    def __init__(
        self,
        components: Sequence[Component],
        nodes: Iterable[Node],
        sink: Sink,
        mode: PassMode,
        wait: Callable[[int], None],
    ) -> None:
        self._components = components
        self._nodes = nodes
        self._sink = sink
        self._mode = mode
        self._wait = wait
        self._receives: dict[Node, ReceiveRecord] = {}
        self._missing: Counter[int] = Counter()
        self._gradients: dict[int, list[Gradient]] = {}
        self._answers: list[Answer] = []
        self._at_leaves: list[tuple[Component, SendRecord, int, Tensor]] = []

    def take_answers(self) -> list[Answer]:
        """Removes and returns the messages whose gradients have become complete."""
        answers, self._answers = self._answers, []
        return answers

    def run(self) -> list[Answer]:
        """Runs everything; returns the messages that have not been answered before."""
        leaves: dict[Node, Leaf] = {}
        with Start() as start, probed_by(self):
            for component in self._components:
                component.add_to(start)
                leaves.update(component.reached.leaves)
                self._receives.update(component.live_receives)
            self._add_gates(start)
            self._add_probes(start)
            first = self._components[0].reached
            start.cut(first.cuts)
            reached = Reached([], leaves, self._receives, first.passed)
            run(reached, start.edges, start.gradients, self._mode, self._sink)
        for component, send, at, leaf in self._at_leaves:
            gradient = self._gradient_of(component, send.message_id, at)
            if gradient is not None:
                self._sink([(leaf, gradient.to(leaf.dtype))], [gradient])
        return self.take_answers()

    def _add_gates(self, start: Start) -> None:
        """Has the run start at the gates of the missing sends, and puts them in their order."""
        gates: list[tuple[int, Node]] = []
        for component in self._components:
            for send, at in component.missing():
                node = send.edges[at].node
                leaf = component.reached.leaves.get(node)
                if isinstance(leaf, Tensor) and not has_hooks(leaf, node):  # Of any layout.
                    self._at_leaves.append((component, send, at, leaf))
                    continue
                gates.append((send.message_id, send.gates[at]))
                take = partial(self._gradient_of, component, send.message_id, at)
                start.open(send.gates[at], take)
        put_last(gates, self._nodes)

    def _gradient_of(self, component: Component, message_id: int, at: int) -> Tensor | None:
        while (gradient := component.take_gradient(message_id, at)) is None:
            self._wait(message_id)
        return gradient if isinstance(gradient, Tensor) else None

    def _add_probes(self, start: Start) -> None:
        """Adds probes at received tensors, which notice when their gradients are there."""
        self._missing.update([receive.message_id for receive in self._receives.values()])
        for node, receive in self._receives.items():
            take = partial(self._take, node, receive, receive.nodes.index(node))
            start.probe(node, take, self)

    def _take(self, node: Node, receive: ReceiveRecord, at: int, gradient: Tensor | None) -> None:
        number = receive.message_id
        found = self._gradients.setdefault(number, [None] * len(receive.nodes))
        if gradient is not None and hooks.has_node_hooks:
            gradient = hooks.at_received(node, gradient, self._mode.create_graph)
        found[at] = UNDEFINED if gradient is None else gradient
        self._missing[number] -= 1
        if not self._missing[number]:
            self._answers.append((receive, self._gradients.pop(number)))
