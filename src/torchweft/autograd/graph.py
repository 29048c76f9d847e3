"""A backward pass on one worker: which sends are live or have gradients, and which nodes may run.

``LocalPass`` is the interface for the shell: it takes gradients and announcements of live sends,
and runs the ready nodes. One thread at a time may use it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torchweft.autograd.codec import PassMode
from torchweft.autograd.component import Component, Live, SingleSend
from torchweft.autograd.contexts import Context, TensorMeta, enter, is_without_memory
from torchweft.autograd.ddp import Averaging, find_averaging
from torchweft.autograd.gradients import UNDEFINED, Gradient, Gradients, add_to_grad
from torchweft.autograd.local_engine import with_leaf_hooks
from torchweft.autograd.outside import OutsideRecords
from torchweft.autograd.pass_arguments import InputGradients, Roots, roots_of
from torchweft.autograd.walk import End, Place, Reached, SentGraph, reached_by_one, writes_to_views
from torchweft.errors import AutogradError, ProtocolError
from torchweft.protocol.backward import ROOTS, Progress


class Outgoing(NamedTuple):
    """Gradients to be sent."""

    to_worker: int
    message_id: int
    gradients: Sequence[Gradient]


class LocalPass:
    """One backward pass through the graphs that one worker recorded in a context.

    Args:
        context: The worker's records; messages sent from now on have no part in the pass.
        mode: How the pass is run.
        gradients: Receives the gradients of leaves; by default the context's table does.
        input_gradients: Captures gradients at places on this worker, if it leads the pass.
        outside: This worker's records outside of contexts.
    """

    def __init__(
        self,
        context: Context,
        mode: PassMode = PassMode(),  # noqa: B008 (it cannot change)
        gradients: Gradients | None = None,
        input_gradients: InputGradients | None = None,
        outside: OutsideRecords | None = None,
    ) -> None:
        self._context = context
        self._outside = outside
        self._mode = mode
        self._ends: Mapping[Node, End] = context.receive_of
        if outside is not None and input_gradients is None:
            self._ends = outside.ends_beside(context.receive_of, context.add_known_worker)
        self._passed: Sequence[Place] = ()
        self._cuts: Collection[Node] = ()
        self._skipped = 0
        self._wanted: Container[Node] | None = () if mode.for_inputs else None
        self._gradients = context.gradients if gradients is None else gradients
        self._sink = with_leaf_hooks(add_to_grad if mode.into_grad else self._gradients.add_all)
        if input_gradients is not None:
            self._ends = input_gradients.ends
            self._passed, self._cuts = input_gradients.passed, input_gradients.cuts
            if mode.for_inputs:
                self._wanted = input_gradients.stops
                self._skipped = input_gradients.first_send
                self._sink = _nowhere
            self._sink = input_gradients.sink_beside(self._sink)
        recording = functools.partial(_recorded_in, context.id)
        self._recording = recording if mode.create_graph else contextlib.nullcontext
        self._is_of_higher_order = context.is_differentiated_twice
        if mode.create_graph:
            context.is_differentiated_twice = True
        self._roots: Roots | None = None
        self._reached_of: dict[int, tuple[Reached, Sequence[Live]]] | None = None
        self._component_of: dict[int, Component | SingleSend] = {}
        self._touched: dict[int, Component | SingleSend] = {}
        self._unfinished: dict[int, Component | SingleSend] = {}
        self._is_settled = False
        self._averaging: Averaging | None = None

    def start(self, roots: Roots | Iterable[Tensor]) -> None:
        """Makes the roots live.

        Args:
            roots: The roots, or scalars whose gradients are ones.

        Raises:
            ArgumentTypeError: If they are not tensors.
            AutogradError: If a root cannot be backpropagated from.
        """
        self._roots = roots = roots if isinstance(roots, Roots) else roots_of(roots)
        gradients = roots.gradients
        if not self._mode.create_graph:
            gradients = tuple([gradient.detach() for gradient in gradients])
        component = self._touch(ROOTS)
        with self._recording():
            component.arrive(ROOTS, gradients)

    def announce(self, message_ids: Iterable[int]) -> None:
        """Notes that messages sent by this worker are live.

        Raises:
            ProtocolError: If this worker sent no such message in the context.
        """
        for message_id in message_ids:
            self._touch(message_id).announce(message_id)

    def arrive(self, message_id: int, gradients: Sequence[Gradient]) -> None:
        """Takes the gradients of a message that this worker sent; does not write to them.

        Raises:
            ProtocolError: If they do not belong to a message that this worker sent.
        """
        component = self._touch(message_id)
        with self._recording():
            component.arrive(message_id, self._placed(message_id, gradients))

    def settle(self) -> None:
        """Notes that all live messages have been announced."""
        self._is_settled = True
        self._touched.update(self._unfinished)

    def work(self) -> tuple[list[Outgoing], Progress]:
        """Runs the ready nodes.

        Returns:
            Gradients to send to the senders of messages received here, and the progress of
            messages since the last call.
        """
        progress = Progress()
        outgoing: list[Outgoing] = []
        touched, self._touched = self._touched, {}
        for key, component in touched.items():
            with self._recording():
                answers = component.advance(self._is_settled, progress)
            for receive, gradients in answers:
                if not self._mode.for_inputs:
                    gradients = with_zeros(gradients, receive.metas)
                outgoing.append(Outgoing(receive.from_worker, receive.message_id, gradients))
            if component.is_finished:
                self._unfinished.pop(key, None)
            else:
                self._unfinished[key] = component
        if self._averaging is not None:
            self._averaging.hold_back(progress, self._is_settled, self._component_of)
        return outgoing, progress

    @property
    def is_waiting(self) -> bool:
        """Whether some part of the pass has not run yet."""
        return bool(self._touched or self._unfinished) or self.is_averaging_due

    @property
    def is_averaging_due(self) -> bool:
        """Whether to call ``average``, once the gradients that ``work`` returned were sent."""
        return self._averaging is not None and self._averaging.is_due

    def average(self) -> Progress:
        """Has DDP average gradients. Blocks until the passes of other ranks do so as well."""
        assert self._averaging is not None
        return self._averaging.run()

    def close(self) -> None:
        """Ends the pass, done or not, and frees its memory."""
        if self._averaging is not None:
            self._averaging.close()
            self._averaging = None
        self._reached_of = {}
        self._component_of, self._touched, self._unfinished = {}, {}, {}
        self._roots = None

    def _touch(self, message_id: int) -> Component | SingleSend:
        component = self._component_of.get(message_id)
        if component is None:
            component = self._make_component(message_id)
        self._touched[id(component)] = component
        return component

    def _make_component(self, message_id: int) -> Component | SingleSend:
        if self._reached_of is None:
            self._reached_of = self._walk_all()
            if not self._mode.for_inputs:
                self._find_averaging(self._reached_of.values())
        if message_id not in self._reached_of:
            raise ProtocolError(
                f"message {message_id} is not among those sent in autograd context "
                f"{self._context.id} by worker {self._context.worker}"
            )
        reached, sends = self._reached_of[message_id]
        component: Component | SingleSend
        mode = self._mode_for(sends)
        if len(sends) == 1 and not reached.cuts:
            component = SingleSend(sends[0], reached, self._ends, self._sink, mode)
        else:
            component = Component(sends, reached, self._ends, self._sink, mode)
        for send in sends:
            self._component_of[send.message_id] = component
        return component

    def _mode_for(self, sends: Sequence[Live]) -> PassMode:
        """Returns the mode of a component; see docs/protocols/autograd.md on memory of graphs."""
        mode = self._mode
        if self._is_of_higher_order and not mode.retain_graph:
            edges = [edge for send in sends for edge in send.edges]
            if writes_to_views(edges, self._ends):
                return mode._replace(retain_graph=True)
        return mode

    def _find_averaging(self, components: Iterable[tuple[Reached, Sequence[Live]]]) -> None:
        self._averaging = find_averaging(components, self._gradients, self._sink)
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

    def _walk_all(self) -> dict[int, tuple[Reached, Sequence[Live]]]:
        """Walks from all sends, used or not; sends that share nodes form a component."""
        sends = [Live(record.message_id, record.edges) for record in self._context.sends()]
        found: dict[int, tuple[Reached, Sequence[Live]]] = {}
        for send in sends[: self._skipped]:  # They lead to no wanted tensor.
            found[send.message_id] = (Reached([0], {}, {}), [send])
        sends = sends[self._skipped :]
        if self._outside is not None and not self._mode.for_inputs:
            sends += [Live(each.message_id, each.edges) for each in self._outside.sends()]
        if self._roots is not None:
            sends.append(Live(ROOTS, self._roots.edges))
        if len(sends) == 1:
            only = sends[0]
            reached = self._as_wanted(reached_by_one(only.edges, self._ends))
            found[only.message_id] = (reached, sends)
            return found
        graph = SentGraph(self._ends)
        for send in sends:
            graph.add(send.edges)
        for component in graph.components():
            reached = self._as_wanted(component)
            members = [sends[member] for member in reached.members]
            for send in members:
                found[send.message_id] = (reached, members)
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
            own = self._context.leaves_behind_placeholders()
            # Leaves of other contexts' placeholders stay targets: reaching one must raise.
            leaves.update({node: leaf for node, leaf in hidden.items() if node not in own})
        return reached._replace(leaves=leaves, passed=self._passed)

    def _placed(self, message_id: int, gradients: Sequence[Gradient]) -> Sequence[Gradient]:
        """Checks gradients, and moves them to the devices of the sent tensors."""
        record = self._context.send(message_id)
        if record is None and self._outside is not None:
            record = self._outside.send(message_id)
        if record is None:
            raise AutogradError(f"autograd context {self._context.id} ended in a backward pass")
        metas = record.metas
        if len(gradients) != len(metas):
            raise ProtocolError(
                f"{len(gradients)} gradients came for message {message_id}, "
                f"which had {len(metas)} tensors that require grad"
            )
        return [_placed_as(meta, gradient) for meta, gradient in zip(metas, gradients, strict=True)]


@contextlib.contextmanager
def _recorded_in(context_id: int) -> Iterator[None]:
    """Records a pass in a context, whatever the thread's grad mode and context.

    Covers the sums that it makes, and the calls that the user's functions make in backward.
    """
    with torch.enable_grad(), enter(context_id):
        yield


def _placed_as(meta: TensorMeta, gradient: Gradient) -> Gradient:
    if gradient is None or gradient is UNDEFINED:
        return gradient
    if not isinstance(gradient, Tensor):
        raise ProtocolError(f"a {type(gradient).__name__} came for a gradient")
    if gradient.shape != meta.shape:
        raise ProtocolError(
            f"a gradient of shape {tuple(gradient.shape)} came for a tensor of shape "
            f"{tuple(meta.shape)}"
        )
    return gradient if gradient.device == meta.device else gradient.to(meta.device)


def _nowhere(pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[Tensor]) -> None:
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


def with_zeros(gradients: list[Gradient], metas: tuple[TensorMeta, ...]) -> list[Gradient]:
    """Returns the gradients of a message; if enabled, with zeros for missing gradients."""
    if not _sends_zeros:
        return gradients
    return [
        torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
        if gradient is None or gradient is UNDEFINED
        else gradient
        for gradient, meta in zip(gradients, metas, strict=True)
    ]
