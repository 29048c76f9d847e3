"""A backward pass on one worker: which sends are live or have gradients, and which nodes may run.

``LocalPass`` is the interface for the shell: it takes gradients and announcements of live sends,
and runs the ready nodes. One thread at a time may use it. Where a graph waits for itself, ``work``
calls ``exchange`` from within: the shell then sends, waits, and delivers what it receives.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torchweft.autograd import data_parallel, hooks
from torchweft.autograd.codec import PassMode
from torchweft.autograd.component import (
    Component,
    GatedRun,
    PassEnded,
    not_due,
    probed_by,
    probing,
)
from torchweft.autograd.contexts import (
    UNDEFINED,
    Context,
    Gradient,
    Gradients,
    SendRecord,
    Sink,
    TensorMeta,
    add_to_grad,
    enter,
    is_without_memory,
)
from torchweft.autograd.graph import (
    Answer,
    EndOf,
    InputGradients,
    Place,
    Reached,
    Roots,
    SentGraph,
    note_reached,
    operations_behind,
    roots_of,
    run_alone,
    writes_to_views,
)
from torchweft.autograd.outside import Ends, OutsideRecords
from torchweft.engine.protocol.backward import NO_PARTS, ROOTS, Parts, Progress
from torchweft.errors import AutogradError, ProtocolError

_REQUIRES_GRAD = attrgetter("requires_grad")

Outgoing = tuple[int, int, Sequence[Gradient]]
"""Gradients to be sent: the worker that gets them, the number of its message, and the gradients."""


class LocalPass:
    """One backward pass through the graphs that one worker recorded in a context.

    Args:
        context: The worker's records; messages sent from now on have no part in the pass.
        mode: How the pass is run.
        gradients: Receives the gradients of leaves; by default the context's table does.
        input_gradients: Captures gradients at places on this worker, if it leads the pass.
        outside: This worker's records outside of contexts; by default there are none.

    Attributes:
        context_id: The autograd context of the pass.
        pass_id: The number of the pass in the group; 0 until the engine has set it.
        exchange: Set by the shell. Takes the number of a message that this worker sent, and what
            ``work`` returns. Sends it, and delivers messages; blocks until there are some. It is
            called in the middle of ``work``, while the gradients of that message are missing.
    """

    pass_id = 0
    exchange: Callable[[int, list[Outgoing], Progress], object]
    _graph: SentGraph | None = None
    _gathering: hooks.Gathering | None = None
    _gated: GatedRun | None = None
    _ends: Ends | None = None
    _passed: Sequence[Place] = ()
    _cuts: Collection[Node] = ()
    _skipped = 0
    _roots: Roots | None = None
    _is_settled = False
    _averaging: data_parallel.Averaging | None = None

    def __init__(
        self,
        context: Context,
        mode: PassMode = PassMode(),  # noqa: B008 (it cannot change)
        gradients: Gradients | None = None,
        input_gradients: InputGradients | None = None,
        outside: OutsideRecords | None = None,
    ) -> None:
        self._context = context
        self.context_id = context.id
        self._outside = outside = outside or OutsideRecords(context.worker)
        self._mode = mode
        self._end_of: EndOf = context.receive_of.get
        if outside.received and input_gradients is None:
            self._ends = Ends(outside, context.receive_of, context.add_known_worker)
            self._end_of = self._ends.get
        self._wanted: Container[Node] | None = () if mode.for_inputs else None
        self._gradients = context.gradients if gradients is None else gradients
        sink: Sink = add_to_grad if mode.into_grad else self._gradients.add_all
        if hooks.has_node_hooks:
            sink = hooks.with_leaf_hooks(sink, mode.create_graph)
        if input_gradients is not None:
            self._end_of = input_gradients.ends.get
            self._passed, self._cuts = input_gradients.passed, input_gradients.cuts
            if mode.for_inputs:
                self._wanted = input_gradients.stops
                self._skipped = input_gradients.first_send
                sink = _nowhere
            sink = input_gradients.sink_beside(sink)
        self._sink = sink
        self._answers_all = _sends_zeros and not mode.for_inputs
        self._is_of_higher_order = context.is_differentiated_twice
        if mode.create_graph:
            context.is_differentiated_twice = True
        self._reached_of: dict[int, Reached] | None = None
        self._alone: dict[int, bool] = {}
        """Live sends that are a component of their own, and whether their gradients have come."""
        self._due: list[tuple[int, Reached, Sequence[Gradient] | None, bool]] = []
        """Those with news: the gradients, if they came, and whether the send is live only now."""
        self._outgoing: list[Outgoing] = []
        self._progress = Progress()
        self._component_of: dict[int, Component] = {}
        self._touched: dict[int, Component] = {}
        self._unfinished: dict[int, Component] = {}

    def start(self, roots: Roots | Iterable[Tensor]) -> None:
        """Makes the roots live.

        Args:
            roots: The roots, or scalars whose gradients are ones.

        Raises:
            ArgumentTypeError: If they are not tensors.
            AutogradError: If a root cannot be backpropagated from.
        """
        self._roots = roots = roots if isinstance(roots, Roots) else roots_of(roots)
        reached = self._reached_by(ROOTS)
        gradients: Sequence[Tensor] = roots.gradients
        if not self._mode.create_graph and any(map(_REQUIRES_GRAD, gradients)):
            gradients = [each.detach() for each in gradients]
        self._arrived(ROOTS, reached, gradients)

    def announce(self, message_ids: Iterable[int], parts: Parts = NO_PARTS) -> None:
        """Notes that messages sent by this worker are live.

        Args:
            message_ids: The messages.
            parts: The live tensors, as bits, of those of which not all tensors are live.

        Raises:
            ProtocolError: If this worker sent no such message in the context.
        """
        for message_id in message_ids:
            reached = self._reached_by(message_id)
            if (
                len(reached.sends) > 1
                or reached.cuts
                or message_id in parts
                or message_id in self._component_of
            ):
                component = self._touch(message_id, reached)
                component.announce(message_id, parts.get(message_id))
            elif message_id not in self._alone:
                self._alone[message_id] = False
                self._due.append((message_id, reached, None, True))

    def arrive(self, message_id: int, gradients: Sequence[Gradient]) -> None:
        """Takes the gradients of a message that this worker sent; does not write to them.

        Raises:
            ProtocolError: If they do not belong to a message that this worker sent.
        """
        reached = self._reached_by(message_id)
        self._arrived(message_id, reached, self._placed(message_id, gradients))

    def _arrived(self, message_id: int, reached: Reached, gradients: Sequence[Gradient]) -> None:
        if len(reached.sends) > 1 or reached.cuts or message_id in self._component_of:
            self._touch(message_id, reached).arrive(message_id, gradients)
            return
        had_come = self._alone.get(message_id)
        if had_come:
            raise not_due(message_id)
        self._alone[message_id] = True
        self._due.append((message_id, reached, gradients, had_come is None))

    def may_keep(self, message_ids: Iterable[int]) -> bool:
        """Returns whether ``forget`` may have an effect. Any thread may call it."""
        reached_of = self._reached_of  # None while a thread may be walking.
        return reached_of is None or not reached_of.keys().isdisjoint(message_ids)

    def forget(self, message_ids: Iterable[int]) -> None:
        """Lets go of the graphs behind messages whose records outside of contexts were dropped.

        Their receivers send no gradients for them any more. Components stay that other messages
        still lead to, or that have yet to run gradients.
        """
        reached_of, graph = self._reached_of, self._graph
        if reached_of is None or graph is None or self._averaging is not None:
            return
        found = [reached_of[each] for each in message_ids if each in reached_of]
        ended = [each for each in found if self._has_ended(each)]
        numbers = {send.message_id for reached in ended for send in reached.sends}
        for number in numbers:
            reached_of.pop(number, None)
            component = self._component_of.pop(number, None)
            self._touched.pop(id(component), None)
            self._unfinished.pop(id(component), None)
        graph.forget(numbers)
        if self._ends is not None:
            for reached in ended:
                self._ends.forget(reached.receives)

    def _has_ended(self, reached: Reached) -> bool:
        numbers = [send.message_id for send in reached.sends]
        component = self._component_of.get(numbers[0])
        if component is not None and component.has_more_to_run:
            return False
        return not any(
            number == ROOTS or self._outside.find(number, self._context) for number in numbers
        )

    def settle(self) -> None:
        """Notes that all live messages have been announced."""
        self._is_settled = True
        self._touched.update(self._unfinished)

    def operations_due(self) -> dict[str, int]:
        """Returns the names of the operations that ``work`` runs next, and how many of each."""
        due = [reached for _, reached, gradients, _ in self._due if gradients is not None]
        due += [component.reached for component in self._touched.values()]
        return operations_behind(due)

    def work(self) -> tuple[list[Outgoing], Progress]:
        """Runs the ready nodes.

        Returns:
            Gradients to send to the senders of messages received here, and the progress of
            messages since the last call.
        """
        if hooks.has_hooks_of_several or self._mode.create_graph or probing.run is not None:
            self._run_with_hooks()
        else:
            self._run()
        return self._take_results()

    def _take_results(self) -> tuple[list[Outgoing], Progress]:
        outgoing, progress = self._outgoing, self._progress
        self._outgoing, self._progress = [], Progress()
        if self._averaging is not None:
            live = self._alone.keys() | self._component_of.keys()
            self._averaging.hold_back(progress, self._is_settled, live)
        return outgoing, progress

    def _run_with_hooks(self) -> None:
        """Runs the ready nodes; gathers for hooks of several tensors, and records the pass."""
        with probed_by(None), contextlib.ExitStack() as around:
            if hooks.has_hooks_of_several:
                self._gathering = self._gathering or hooks.Gathering()
                around.enter_context(hooks.gathered_by(self._gathering))
            if self._mode.create_graph:
                # Also the calls that the user's functions make in backward are recorded.
                around.enter_context(torch.enable_grad())
                around.enter_context(enter(self._context.id))
            self._run()
        self.finish_hooks(self._may_run)

    def _run(self) -> None:
        due, self._due = self._due, []
        progress = self._progress
        for message_id, reached, gradients, is_live_now in due:
            if is_live_now:
                progress.walked.append(message_id)
            if gradients is None:
                note_reached(progress, reached.receives, (), self._answers_all)
                continue
            mode = self._mode_for(reached) if self._is_of_higher_order else self._mode
            answers = run_alone(reached, gradients, self._end_of, self._sink, mode)
            if answers is None:
                whole = Component(reached, self._end_of, self._sink, mode)
                whole.arrive(message_id, gradients)
                answers = whole.advance(True, Progress())
            progress.executed.append(message_id)
            if answers:
                self._answer(answers)
        if self._touched:
            self._advance()
        if self._is_settled and self._unfinished and self._gated is None:
            self._run_gated()
            if self._due or self._touched:  # They came while the last gate waited.
                self._run()

    def _advance(self) -> None:
        touched, self._touched = self._touched, {}
        for key, component in touched.items():
            self._answer(component.advance(self._is_settled, self._progress))
            if component.is_finished:
                self._unfinished.pop(key, None)
            else:
                self._unfinished[key] = component

    def _run_gated(self) -> None:
        """Runs the components that wait for themselves, once gradients of some have come."""
        place_of = {send.message_id: place for place, send in enumerate(self._context.sends())}
        waiting = [each for each in self._unfinished.values() if each.waits_for_itself(place_of)]
        if not any(component.given for component in waiting):
            return
        assert self._graph is not None
        for component in waiting:
            component.is_in_gates = True
        mode = self._mode._replace(retain_graph=any(each.mode.retain_graph for each in waiting))
        numbers = {send.message_id for each in waiting for send in each.reached.sends}
        nodes = self._graph.nodes_of(numbers)
        self._gated = GatedRun(waiting, nodes, self._sink, mode, self._wait)
        try:
            answers = self._gated.run()
        finally:
            self._gated = None
        self._answer(answers)
        for component in waiting:
            component.finish(self._progress)
            self._unfinished.pop(id(component), None)
            self._touched.pop(id(component), None)

    def _wait(self, message_id: int) -> None:
        """Exchanges messages with other workers, in a gate of the running engine."""
        assert self._gated is not None
        self._answer(self._gated.take_answers())
        self._run()
        self.exchange(message_id, *self._take_results())

    def _answer(self, answers: Iterable[Answer]) -> None:
        for receive, gradients in answers:
            if self._answers_all:
                gradients = with_zeros(gradients, receive.nodes)
            self._progress.answered.append(receive.message_id)
            self._outgoing.append((receive.from_worker, receive.message_id, gradients))

    @property
    def is_waiting(self) -> bool:
        """Whether some part of the pass has not run yet."""
        is_any_due = bool(self._due or self._touched or self._unfinished)
        return is_any_due or not all(self._alone.values()) or self.is_averaging_due

    @property
    def is_averaging_due(self) -> bool:
        """Whether to call ``average``, once the gradients that ``work`` returned were sent."""
        return self._averaging is not None and self._averaging.is_due

    def average(self) -> Progress:
        """Has DDP average gradients. Blocks until the passes of other ranks do so as well."""
        assert self._averaging is not None
        return self._averaging.run()

    def _may_run(self, node: Node) -> bool:
        """Returns whether a node of the graph has yet to run, for all that is known here."""
        reached = None if self._graph is None else self._graph.component_at(node)
        if reached is None:
            return False
        numbers = [send.message_id for send in reached.sends]
        component = self._component_of.get(numbers[0])
        if component is not None:
            return not component.is_finished
        return not (self._is_settled or all(map(self._alone.get, numbers)))

    def finish_hooks(self, may_run: Callable[[Node], bool] = lambda _: False) -> None:
        """Calls the hooks of several tensors that wait only for nodes that do not run any more.

        Args:
            may_run: Whether a node may still run; by default nothing more will.
        """
        if self._gathering is not None and self._gathering.is_waiting:
            with torch.set_grad_enabled(self._mode.create_graph):
                self._gathering.finish(may_run)

    def close(self) -> None:
        """Ends the pass, done or not, and frees its memory."""
        if self._averaging is not None:
            self._averaging.close()
            self._averaging = None
        self._reached_of = {}
        self._alone, self._due = {}, []
        self._component_of, self._touched, self._unfinished = {}, {}, {}
        self._roots = self._graph = None
        self._outgoing = []
        self.exchange = _end_pass  # The shell's function leads back here.

    def _reached_by(self, message_id: int) -> Reached:
        """Returns the component of a send, or of the roots.

        Raises:
            ProtocolError: If this worker sent no such message in the context.
        """
        if self._reached_of is None:
            self._reached_of = self._walk_all()
            if not self._mode.for_inputs:
                if "torch.distributed.fsdp" in sys.modules:
                    data_parallel.check_unsharded(self._reached_of)
                if data_parallel.has_known:
                    self._find_averaging(self._reached_of.values())
        try:
            return self._reached_of[message_id]
        except KeyError:
            raise ProtocolError(
                f"message {message_id} is not among those sent in autograd context "
                f"{self._context.id} by worker {self._context.worker}"
            ) from None

    def _touch(self, message_id: int, reached: Reached) -> Component:
        component = self._component_of.get(message_id)
        if component is None:
            mode = self._mode_for(reached) if self._is_of_higher_order else self._mode
            component = Component(reached, self._end_of, self._sink, mode, self._answers_all)
            for send in reached.sends:
                self._component_of[send.message_id] = component
        self._touched[id(component)] = component
        return component

    def _mode_for(self, reached: Reached) -> PassMode:
        """Returns the mode of a component; see docs/protocols/autograd.md on memory of graphs."""
        mode = self._mode
        if not mode.retain_graph:
            edges = [edge for send in reached.sends for edge in send.edges]
            if writes_to_views(edges, self._end_of):
                return mode._replace(retain_graph=True)
        return mode

    def _find_averaging(self, components: Iterable[Reached]) -> None:
        self._averaging = data_parallel.find_averaging(components, self._gradients, self._sink)
        if self._averaging is None:
            return
        if self._mode.into_grad:
            raise AutogradError(
                "this pass leads to a module under DistributedDataParallel, and belongs to no "
                "context: open `with torchweft.autograd.context() as context_id:` around the "
                "forward pass, and call backward(context_id, [loss]) there"
            )
        if self._mode.create_graph:
            raise AutogradError(
                "create_graph=True leads to a module under DistributedDataParallel, whose averages "
                "cannot be differentiated; use the module itself, and average in the last pass"
            )
        self._sink = self._averaging.add_all

    def _walk_all(self) -> dict[int, Reached]:
        """Walks from all sends, used or not; sends that share nodes form a component."""
        sends = self._context.sends()
        graph = self._graph = SentGraph(self._end_of)
        for send in sends[self._skipped :]:
            graph.add(send)
        if not self._mode.for_inputs:
            for send in self._outside.sends():
                graph.add(send)
        if self._roots is not None:
            graph.add(SendRecord(ROOTS, self._context.worker, (), (), edges=self._roots.edges))
        found = graph.components()
        if self._wanted is not None or self._cuts:
            wanted = {id(each): self._as_wanted(each) for each in found.values()}
            found = {number: wanted[id(each)] for number, each in found.items()}
        for send in sends[: self._skipped]:  # They lead to no wanted tensor.
            found[send.message_id] = Reached([send], {}, {})
        return found

    def _as_wanted(self, reached: Reached) -> Reached:
        """Omits leaves whose gradients are not wanted."""
        wanted = self._wanted
        if self._cuts:
            reached = reached._replace(cuts=self._cuts)
        if wanted is None:
            return reached
        leaves = {node: leaf for node, leaf in reached.leaves.items() if node in wanted}
        hidden = {
            node: leaf
            for node, leaf in reached.leaves.items()
            if node not in leaves and is_without_memory(leaf)
        }
        if hidden:
            own = {each for node in [*self._context.receive_of] for each, _ in node.next_functions}
            # Leaves of other contexts' placeholders stay targets: reaching one must raise.
            leaves.update({node: leaf for node, leaf in hidden.items() if node not in own})
        return reached._replace(leaves=leaves, passed=self._passed)

    def _placed(self, message_id: int, gradients: Sequence[Gradient]) -> Sequence[Gradient]:
        """Checks gradients, and moves them to the devices of the sent tensors."""
        record = self._outside.find(message_id, self._context)
        if record is None:
            raise AutogradError(f"autograd context {self._context.id} ended in a backward pass")
        metas = record.metas
        if len(gradients) != len(metas):
            raise ProtocolError(
                f"{len(gradients)} gradients came for message {message_id}, "
                f"which had {len(metas)} tensors that require grad"
            )
        return [*map(_placed_as, metas, gradients)]


def _end_pass(*_: object) -> None:
    raise PassEnded


def _placed_as(meta: TensorMeta, gradient: Gradient) -> Gradient:
    if not isinstance(gradient, Tensor):
        if gradient is None or gradient is UNDEFINED:
            return gradient
        raise ProtocolError(f"a {type(gradient).__name__} came for a gradient")
    if gradient.shape != meta.shape:
        raise ProtocolError(
            f"a gradient of shape {tuple(gradient.shape)} came for a tensor of shape "
            f"{tuple(meta.shape)}"
        )
    if gradient.device == meta.device:
        return gradient
    with torch.enable_grad():  # In a recorded pass it has a graph.
        return gradient.to(meta.device)


def _nowhere(pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[object]) -> None:
    """Discards gradients that are not wanted."""


# Zeros in place of missing gradients, as ``torch.distributed.autograd`` sends them. There, each
# message that a backward pass reaches is answered with a gradient for each tensor, with zeros for
# missing gradients. So the remote part runs where one process would run nothing, and its leaves get
# zero gradients. Programs written for ``torch.distributed.autograd`` may rely on that.

_sends_zeros = False


def enable_zeros(enabled: bool = True) -> None:
    """Sets whether passes send zeros from now on."""
    global _sends_zeros
    _sends_zeros = enabled


def with_zeros(gradients: list[Gradient], nodes: Iterable[Any]) -> list[Gradient]:
    """Returns the gradients of a message with zeros for those that its placeholders lack."""
    return [
        gradient if isinstance(gradient, Tensor) else _zeros_at(node)
        for gradient, node in zip(gradients, nodes, strict=True)
    ]


def _zeros_at(node: Any) -> Tensor:
    meta = node._input_metadata[0]
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
