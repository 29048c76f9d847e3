"""A backward pass on one worker: which sends are live, what has arrived, what may run.

``LocalPass`` is all that the shell needs: it walks when asked what is live, keeps gradients that
arrive, and runs what has become ready. It has a lock for each concern: ``_walk_lock`` for the
graph while it is discovered, and ``_inbox_lock``, never held for long, for what arrives. Only one
thread runs the graph at a time; others leave their gradients to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from weft.autograd.component import Answer, Component, Live, Sink
from weft.autograd.contexts import Context, ReceiveRecord, SendRecord, TensorMeta
from weft.autograd.walk import LiveGraph
from weft.errors import AutogradError, ProtocolError

ROOTS = 0
"""Stands for the roots where a message number is expected; no message has it."""

Frontier = dict[int, list[int]]
"""Messages that were reached at their receiver, by the worker that sent them."""


class Outgoing(NamedTuple):
    """Gradients to be sent: ``gradients`` has None for tensors that have none."""

    to_worker: int
    message_id: int
    gradients: list[Tensor | None]


class LocalPass:
    """One backward pass through the graphs that one worker recorded in a context; thread-safe.

    Call ``walk_roots`` (driver) and ``walk_sends`` while the pass discovers, then ``run`` once,
    and ``gradients_arrived`` for each message of gradients, also before ``run``.

    Args:
        context: What the worker recorded.
        sink: Takes the gradients of leaves; by default the context does.
    """

    def __init__(self, context: Context, sink: Sink | None = None) -> None:
        self._context = context
        self._sink = context.gradients.add_all if sink is None else sink
        self._walk_lock = threading.Lock()
        self._graph = LiveGraph(context.receive_of)
        self._live: dict[int, Live] = {}
        self._roots: tuple[Tensor, ...] = ()
        self._reached: set[int] = set()
        self._component_of: dict[int, Component] = {}
        self._inbox_lock = threading.Lock()
        self._inbox: dict[int, Sequence[Tensor | None]] = {}
        self._waiting_for: set[int] = set()
        self._is_running = False
        self._is_started = False
        self._is_closed = False
        self._is_fast = False

    def walk_roots(self, roots: Iterable[Tensor]) -> Frontier:
        """Makes the roots live; their gradients are ones.

        Args:
            roots: Scalars that require grad.

        Returns:
            The messages to walk from next.

        Raises:
            AutogradError: If a root cannot be backpropagated from.
        """
        checked = _checked_roots(roots)
        with self._walk_lock:
            # The tensors keep the graph alive: an edge to a Python node alone would not.
            self._roots = checked
            edges = tuple(get_gradient_edge(root) for root in checked)
            return _by_sender(self._walk(Live(ROOTS, edges)))

    def walk_sends(self, message_ids: Iterable[int]) -> Frontier:
        """Makes sends live that are not yet.

        Returns:
            The messages to walk from next: those reached for the first time.

        Raises:
            ProtocolError: If this worker sent no such message in the context.
        """
        reached: list[ReceiveRecord] = []
        with self._walk_lock:
            for message_id in message_ids:
                if message_id not in self._live:
                    reached += self._walk(_live_of(self._record_of(message_id)))
        return _by_sender(reached)

    def _walk(self, live: Live) -> list[ReceiveRecord]:
        self._live[live.message_id] = live
        _, reached = self._graph.add(live.edges)
        self._reached.update(receive.message_id for receive in reached)
        return reached

    def _record_of(self, message_id: int) -> SendRecord:
        record = self._context.send(message_id)
        if record is None:
            raise ProtocolError(
                f"message {message_id} is not among those sent in autograd context "
                f"{self._context.id} by worker {self._context.worker}"
            )
        return record

    def run(
        self,
        *,
        retain_graph: bool = False,
        fast: bool = False,
        answer_late: Callable[[Outgoing], None] = lambda outgoing: None,
    ) -> list[Outgoing]:
        """Starts the pass: all live sends are known now. Runs what is ready.

        Args:
            retain_graph: Whether the graph must survive for another pass.
            fast: Whether nothing was discovered: all sends are live, all receives get an answer.
            answer_late: Takes the answers to messages that arrive after this, where all get one.

        Returns:
            Gradients to send to the senders of messages received here.
        """
        unreached: list[Outgoing] = []
        with self._walk_lock:
            if fast:
                unreached = self._discover_all(answer_late)
            self._form_components(retain_graph)
        with self._inbox_lock:
            self._waiting_for = set(self._live)
            self._is_started = True
            if self._roots:
                self._inbox[ROOTS] = [torch.ones_like(root) for root in self._roots]
        return unreached + self._drain()

    def _discover_all(self, answer_late: Callable[[Outgoing], None]) -> list[Outgoing]:
        self._is_fast = True
        for record in self._context.sends():
            if record.message_id not in self._live:
                self._walk(_live_of(record))
        # Calls that nobody waits for may still be on their way; their senders wait for this pass.
        receives = self._context.follow_receives(lambda late: answer_late(_answer_none(late)))
        return [
            _answer_none(receive) for receive in receives if receive.message_id not in self._reached
        ]

    def _form_components(self, retain_graph: bool) -> None:
        live = list(self._live.values())
        for reached in self._graph.components():
            sends = [live[member] for member in reached.members]
            component = Component(
                sends, reached, self._context.receive_of, self._sink, retain_graph
            )
            self._component_of.update((send.message_id, component) for send in sends)

    def gradients_arrived(
        self, message_id: int, gradients: Sequence[Tensor | None]
    ) -> list[Outgoing]:
        """Takes the gradients of a message that was sent here, and runs what is ready.

        If another thread is running the pass, that thread goes on with them, and this one gets
        an empty list. The tensors must not be written to any more.

        Returns:
            Gradients to send to the senders of messages received here.
        """
        self.keep(message_id, gradients)
        return self._drain()

    def keep(self, message_id: int, gradients: Sequence[Tensor | None]) -> None:
        """Takes gradients without running anything; the next ``execute`` goes on with them."""
        with self._inbox_lock:
            self._inbox[message_id] = gradients

    def execute(self) -> list[Outgoing] | None:
        """Runs once through what has arrived.

        Returns:
            Gradients to send. None if there is nothing to run, or another thread is at it.
        """
        with self._inbox_lock:
            if self._is_running or not self._is_started or not self._inbox or self._is_closed:
                return None
            self._is_running = True
            arrived, self._inbox = self._inbox, {}
        answers: list[Answer] | None = None
        try:
            answers = self._advance(arrived)
        finally:
            self._stop_running(arrived, failed=answers is None)
        return [Outgoing(r.from_worker, r.message_id, gradients) for r, gradients in answers]

    def _stop_running(self, arrived: Iterable[int], failed: bool) -> None:
        with self._inbox_lock:
            self._is_running = False
            if failed:
                self._is_closed = True
            else:
                self._waiting_for.difference_update(arrived)
            if self._is_closed:
                self._let_go()

    def _drain(self) -> list[Outgoing]:
        outgoing: list[Outgoing] = []
        # Whoever finds another thread running may leave: that thread looks again before it does.
        while (batch := self.execute()) is not None:
            outgoing += batch
        return outgoing

    def _advance(self, arrived: dict[int, Sequence[Tensor | None]]) -> list[Answer]:
        touched: dict[int, Component] = {}
        for message_id, gradients in arrived.items():
            component = self._component_of.get(message_id)
            if component is None and self._is_fast and not any(g is not None for g in gradients):
                continue  # It was sent after the pass began here.
            if component is None or message_id not in self._waiting_for:
                raise ProtocolError(f"gradients of message {message_id} came without being due")
            component.arrive(self._live[message_id], self._placed(message_id, gradients))
            touched[id(component)] = component
        answers = []
        for component in touched.values():
            answers += component.advance()
        return answers

    def _placed(
        self, message_id: int, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Returns the gradients checked, and where the tensors were when they were sent."""
        if message_id == ROOTS:
            return gradients
        metas = self._record_of(message_id).metas
        if len(gradients) != len(metas):
            raise ProtocolError(
                f"{len(gradients)} gradients came for message {message_id}, "
                f"which had {len(metas)} tensors that require grad"
            )
        return [_placed_as(meta, gradient) for meta, gradient in zip(metas, gradients, strict=True)]

    @property
    def live_sends(self) -> frozenset[int]:
        """Messages sent here whose gradients this pass waits for, or has had."""
        with self._walk_lock:
            return frozenset(self._live) - {ROOTS}

    @property
    def is_done(self) -> bool:
        """Whether all that is live here has run."""
        with self._inbox_lock:
            return self._is_started and not self._waiting_for and not self._is_running

    def close(self) -> None:
        """Ends the pass, done or not: nothing runs any more, and its memory is let go."""
        with self._inbox_lock:
            self._is_closed = True
            if not self._is_running:
                self._let_go()

    def _let_go(self) -> None:
        self._inbox = {}
        self._component_of = {}
        self._live = {}
        self._roots = ()
        self._graph = LiveGraph(self._context.receive_of)


def _placed_as(meta: TensorMeta, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    if gradient.shape != meta.shape:
        raise ProtocolError(
            f"a gradient of shape {tuple(gradient.shape)} came for a tensor of shape "
            f"{tuple(meta.shape)}"
        )
    return gradient if gradient.device == meta.device else gradient.to(meta.device)


def _answer_none(receive: ReceiveRecord) -> Outgoing:
    return Outgoing(receive.from_worker, receive.message_id, [None] * len(receive.metas))


def _live_of(record: SendRecord) -> Live:
    return Live(record.message_id, record.edges)


def _by_sender(receives: Iterable[ReceiveRecord]) -> Frontier:
    frontier: Frontier = {}
    for receive in receives:
        frontier.setdefault(receive.from_worker, []).append(receive.message_id)
    return frontier


def _checked_roots(roots: Iterable[Tensor]) -> tuple[Tensor, ...]:
    checked = tuple(roots)
    if not checked:
        raise AutogradError("backward needs at least one root")
    for place, root in enumerate(checked):
        if not isinstance(root, Tensor):
            raise AutogradError(f"root {place} is a {type(root).__name__}, not a tensor")
        if not root.requires_grad:
            raise AutogradError(
                f"root {place} does not require grad; was it made under torch.no_grad(), "
                "or of tensors that do not require grad?"
            )
        if root.numel() != 1:
            raise AutogradError(
                f"root {place} has shape {tuple(root.shape)}; all roots must be scalars, "
                "take a sum() or mean() first"
            )
    return checked
