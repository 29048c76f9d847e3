"""A backward pass on one worker: what is live, what has arrived, what may run.

``LocalPass`` is all that the shell needs: it takes gradients and news of what is live, and runs
what has become ready. One thread at a time may use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from weft.autograd.averaging import Averaging, find_averaging
from weft.autograd.component import Component, Live
from weft.autograd.contexts import Context, TensorMeta
from weft.autograd.gradients import Sink
from weft.autograd.leaf_hooks import with_leaf_hooks
from weft.autograd.lone import LoneSend
from weft.autograd.walk import Reached, SentGraph, reached_by_one
from weft.errors import ArgumentTypeError, AutogradError, ProtocolError
from weft.protocol.backward import ROOTS, Progress


class Outgoing(NamedTuple):
    """Gradients to be sent: ``gradients`` has None for tensors that have none."""

    to_worker: int
    message_id: int
    gradients: Sequence[Tensor | None]


class LocalPass:
    """One backward pass through the graphs that one worker recorded in a context.

    Args:
        context: What the worker recorded; what is sent from now on has no part in the pass.
        retain_graph: Whether the graph must survive for another pass.
        sink: Takes the gradients of leaves; by default the context does.
    """

    def __init__(
        self, context: Context, retain_graph: bool = False, sink: Sink | None = None
    ) -> None:
        self._context = context
        self._retain_graph = retain_graph
        self._sink = with_leaf_hooks(context.gradients.add_all if sink is None else sink)
        self._roots: tuple[Tensor, ...] = ()
        self._reached_of: dict[int, tuple[Reached, Sequence[Live]]] | None = None
        self._component_of: dict[int, Component | LoneSend] = {}
        self._touched: dict[int, Component | LoneSend] = {}
        self._unfinished: dict[int, Component | LoneSend] = {}
        self._is_settled = False
        self._averaging: Averaging | None = None

    def start(self, roots: Iterable[Tensor]) -> None:
        """Makes the roots live; their gradients are ones.

        Args:
            roots: Scalars that require grad.

        Raises:
            ArgumentTypeError: If they are no tensors.
            AutogradError: If a root cannot be backpropagated from.
        """
        # The tensors keep the graph alive: an edge to a Python node alone would not.
        self._roots = _checked_roots(roots)
        self._touch(ROOTS).arrive(ROOTS, [torch.ones_like(root) for root in self._roots])

    def announce(self, message_ids: Iterable[int]) -> None:
        """Notes that messages which were sent here are live.

        Raises:
            ProtocolError: If this worker sent no such message in the context.
        """
        for message_id in message_ids:
            self._touch(message_id).announce(message_id)

    def arrive(self, message_id: int, gradients: Sequence[Tensor | None]) -> None:
        """Takes the gradients of a message that was sent here; they may not be written to.

        Raises:
            ProtocolError: If they do not belong to a message that this worker sent.
        """
        component = self._touch(message_id)
        component.arrive(message_id, self._placed(message_id, gradients))

    def settle(self) -> None:
        """Notes that of all live messages there has been news."""
        self._is_settled = True
        self._touched.update(self._unfinished)

    def work(self) -> tuple[list[Outgoing], Progress]:
        """Runs what is ready.

        Returns:
            Gradients to send to the senders of messages received here, and what has become of
            messages since the last time.
        """
        progress = Progress()
        outgoing: list[Outgoing] = []
        touched, self._touched = self._touched, {}
        for key, component in touched.items():
            for receive, gradients in component.advance(self._is_settled, progress):
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
        """Whether something that is part of the pass has not run yet."""
        return bool(self._touched or self._unfinished) or self.is_averaging_due

    @property
    def is_averaging_due(self) -> bool:
        """Whether ``average`` has something to do, after what ``work`` returned was sent."""
        return self._averaging is not None and self._averaging.is_due

    def average(self) -> Progress:
        """Has DDP average gradients. Blocks until the passes of other ranks come to it as well."""
        assert self._averaging is not None
        return self._averaging.run()

    def close(self) -> None:
        """Ends the pass, done or not: its memory is let go."""
        if self._averaging is not None:
            self._averaging.close()
            self._averaging = None
        self._reached_of = {}
        self._component_of, self._touched, self._unfinished = {}, {}, {}
        self._roots = ()

    def _touch(self, message_id: int) -> Component | LoneSend:
        component = self._component_of.get(message_id)
        if component is None:
            component = self._make_component(message_id)
        self._touched[id(component)] = component
        return component

    def _make_component(self, message_id: int) -> Component | LoneSend:
        if self._reached_of is None:
            self._reached_of = self._walk_all()
            components = self._reached_of.values()
            self._averaging = find_averaging(components, self._context, self._sink)
            if self._averaging is not None:
                self._sink = self._averaging.add_all
        if message_id not in self._reached_of:
            raise ProtocolError(
                f"message {message_id} is not among those sent in autograd context "
                f"{self._context.id} by worker {self._context.worker}"
            )
        reached, sends = self._reached_of[message_id]
        component: Component | LoneSend
        if len(sends) == 1:
            component = LoneSend(sends[0], reached, self._sink, self._retain_graph)
        else:
            component = Component(
                sends, reached, self._context.receive_of, self._sink, self._retain_graph
            )
        for send in sends:
            self._component_of[send.message_id] = component
        return component

    def _walk_all(self) -> dict[int, tuple[Reached, Sequence[Live]]]:
        """Walks from all that was sent, used or not; what shares nodes forms a component."""
        sends = [Live(record.message_id, record.edges) for record in self._context.sends()]
        if self._roots:
            sends.append(Live(ROOTS, tuple(get_gradient_edge(root) for root in self._roots)))
        if len(sends) == 1:
            only = sends[0]
            reached = reached_by_one(only.edges, self._context.receive_of)
            return {only.message_id: (reached, sends)}
        graph = SentGraph(self._context.receive_of)
        for send in sends:
            graph.add(send.edges)
        found: dict[int, tuple[Reached, Sequence[Live]]] = {}
        for reached in graph.components():
            members = [sends[member] for member in reached.members]
            for send in members:
                found[send.message_id] = (reached, members)
        return found

    def _placed(
        self, message_id: int, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Returns the gradients checked, and where the tensors were when they were sent."""
        record = self._context.send(message_id)
        if record is None:
            raise AutogradError(f"autograd context {self._context.id} ended in a backward pass")
        metas = record.metas
        if len(gradients) != len(metas):
            raise ProtocolError(
                f"{len(gradients)} gradients came for message {message_id}, "
                f"which had {len(metas)} tensors that require grad"
            )
        return [_placed_as(meta, gradient) for meta, gradient in zip(metas, gradients, strict=True)]


def _placed_as(meta: TensorMeta, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    if gradient.shape != meta.shape:
        raise ProtocolError(
            f"a gradient of shape {tuple(gradient.shape)} came for a tensor of shape "
            f"{tuple(meta.shape)}"
        )
    return gradient if gradient.device == meta.device else gradient.to(meta.device)


def _checked_roots(roots: Iterable[Tensor]) -> tuple[Tensor, ...]:
    try:
        checked = tuple(roots)
    except TypeError as error:
        raise ArgumentTypeError(
            "incompatible function arguments: the roots must be a list of tensors, "
            f"not a {type(roots).__name__}; for one loss pass [loss]"
        ) from error
    if not checked:
        raise AutogradError(
            "No tensors provided for gradient computation; backward needs at least one root"
        )
    for place, root in enumerate(checked):
        if not isinstance(root, Tensor):
            raise ArgumentTypeError(
                f"incompatible function arguments: root {place} is a {type(root).__name__}, "
                "not a tensor"
            )
        if not root.requires_grad:
            raise AutogradError(
                f"root {place} does not require grad (requires_grad not set on it); was it made "
                "under torch.no_grad(), or of tensors that do not require grad?"
            )
        if root.numel() != 1:
            raise AutogradError(
                f"root {place} has shape {tuple(root.shape)}; it is not a scalar, all roots need "
                "to be scalar: take a sum() or mean() first"
            )
    return checked
