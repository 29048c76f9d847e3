"""Contexts: what a worker records about one forward pass, and the gradients that come of it.

A context has one number in the whole group and a ``Context`` on each worker that took part. A
message that carries tensors which require grad leaves a send at its sender and a receive at its
receiver, under one message id; backward passes go along them in the opposite direction.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from torchweft.autograd.gradients import Gradients
from torchweft.autograd.placeholders import make_placeholders
from torchweft.errors import AutogradError
from torchweft.ids import scoped_id
from torchweft.protocol.tombstones import Tombstones

REQUIRES_GRAD = 1
"""Flag of a tensor that required grad at its sender."""

PARAMETER = 2
"""Flag of a tensor that was a ``torch.nn.Parameter`` at its sender."""

SHARED = 4
"""Flag of a tensor that has memory in common with another one of its message."""


@dataclass(slots=True)
class TensorMeta:
    """What a gradient must look like to belong to a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class SendRecord:
    """A message that was sent, by the tensors in it that require grad, in their order.

    Attributes:
        message_id: Number of the message in the group.
        to_worker: Who received it, and will send the gradients.
        edges: Where in the graph the gradients go.
        metas: What they must look like.
        owners: Nodes that keep the graph behind ``edges`` alive.
    """

    message_id: int
    to_worker: int
    edges: tuple[GradientEdge, ...]
    metas: tuple[TensorMeta, ...]
    owners: tuple[Node, ...]


@dataclass(slots=True)
class ReceiveRecord:
    """A message that was received, by the tensors in it that required grad, in their order.

    Attributes:
        message_id: Number of the message in the group.
        from_worker: Who sent it, and waits for the gradients.
        nodes: The placeholders, one for each tensor.
        metas: What the tensors look like here.
        sends_before: How many messages this worker had sent in the context before: nothing that
            was sent later can lead to this one.
        is_answer: Whether it is the result of a call that this worker has made.
    """

    message_id: int
    from_worker: int
    nodes: list[Node]
    metas: tuple[TensorMeta, ...]
    sends_before: int = 0
    is_answer: bool = False


def flags_of(tensor: Tensor) -> int:
    """Returns what a receiver must know of a tensor to record it."""
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    return flags | PARAMETER if isinstance(tensor, torch.nn.Parameter) else flags


class Context:
    """What one worker knows of a context; thread-safe.

    Args:
        context_id: Number of the context in the group.
        worker: This worker.
        counter: Makes the numbers of messages; shared by all contexts of the worker.
    """

    def __init__(self, context_id: int, worker: int, counter: Iterator[int] | None = None) -> None:
        self.id = context_id
        self.worker = worker
        self.gradients = Gradients()
        self.receive_of: dict[Node, ReceiveRecord] = {}
        """Receives by placeholder nodes; graph walks end at these."""
        self.maps: list[Any] = []
        """Computations of this worker that can be repeated if others are lost; see mapreduce."""
        self.is_differentiated_twice = False
        """Whether a pass through what was recorded has been recorded itself."""
        self._counter = itertools.count(1) if counter is None else counter
        self._lock = threading.Lock()
        self._sends: dict[int, SendRecord] = {}
        self._receives: dict[int, ReceiveRecord] = {}
        self._known_workers: set[int] = set()
        self._is_cleared = False

    def record_send(self, tensors: Iterable[Tensor], to_worker: int) -> int:
        """Records a message that is about to be sent.

        Args:
            tensors: All tensors of the message; those that do not require grad are passed over.
            to_worker: Who will receive it.

        Returns:
            The number of the message, or 0 if none of its tensors requires grad.
        """
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        self.add_known_worker(to_worker)
        if not differentiable:
            return 0
        # next() of itertools.count is one bytecode: atomic under the interpreter lock.
        message_id = scoped_id(self.worker, next(self._counter))
        record = send_record(message_id, to_worker, differentiable)
        with self._lock:
            self._sends[message_id] = record
        return message_id

    def record_receive(
        self,
        message_id: int,
        from_worker: int,
        tensors: Sequence[Tensor],
        flags: Sequence[int],
        is_answer: bool = False,
    ) -> list[Tensor]:
        """Records a message that was received, and puts placeholders for its tensors.

        Args:
            message_id: What ``record_send`` returned at the sender.
            from_worker: The sender.
            tensors: All tensors of the message, as received; those with ``REQUIRES_GRAD`` are
                used up: only what is returned may be used afterwards.
            flags: ``flags_of`` each tensor at the sender, and ``SHARED``.
            is_answer: Whether it is the result of a call.

        Returns:
            The tensors for the program.
        """
        self.add_known_worker(from_worker)
        result = list(tensors)
        places = [place for place, flag in enumerate(flags) if flag & REQUIRES_GRAD]
        if message_id and places:
            for place in places:
                # Graphs of their own need memory of their own: nothing would tell the one of a
                # change in place of the other.
                if flags[place] & SHARED:
                    result[place] = result[place].clone()
            self.place_received(message_id, from_worker, result, places, is_answer)
        for tensor, flag in zip(result, flags, strict=True):
            if flag & PARAMETER:
                # What isinstance(tensor, torch.nn.Parameter) looks at.
                tensor._is_param = True
        return result

    def place_received(
        self,
        message_id: int,
        from_worker: int,
        values: list[Any],
        places: Sequence[int],
        is_answer: bool = False,
    ) -> None:
        """Records the tensors of a received message that required grad at a known worker.

        Args:
            message_id: What ``record_send`` returned at the sender.
            from_worker: The sender.
            values: What was received; placeholders take the place of these tensors.
            places: Where in it they are.
            is_answer: Whether it is the result of a call.
        """
        tensors = [values[place] for place in places]
        metas = metas_of(tensors)
        nodes, placeholders = make_placeholders(tensors)
        before = len(self._sends)
        record = ReceiveRecord(message_id, from_worker, nodes, metas, before, is_answer)
        with self._lock:
            self._receives[message_id] = record
            for node in nodes:
                self.receive_of[node] = record
        for place, placeholder in zip(places, placeholders, strict=True):
            values[place] = placeholder

    def add_known_worker(self, worker: int) -> None:
        """Notes a worker that takes part in the context.

        Raises:
            AutogradError: If the context has been released, and the worker was not known before.
        """
        # One add to a set is atomic; readers copy under the lock that adders of new ones take.
        if worker != self.worker and worker not in self._known_workers:
            with self._lock:
                if self._is_cleared:  # Those known have been told, and nobody would tell this one.
                    raise _released_error(self.id)
                self._known_workers.add(worker)

    @property
    def known_workers(self) -> frozenset[int]:
        """The other workers that this one exchanged messages of the context with."""
        with self._lock:
            return frozenset(self._known_workers)

    def send(self, message_id: int) -> SendRecord | None:
        """Returns what was recorded of a message that was sent here."""
        return self._sends.get(message_id)

    def sends(self) -> list[SendRecord]:
        """Returns all messages that were sent here."""
        with self._lock:
            return list(self._sends.values())

    def receives(self) -> list[ReceiveRecord]:
        """Returns all messages that were received here."""
        with self._lock:
            return list(self._receives.values())

    def leaves_behind_placeholders(self) -> set[Node | None]:
        """Returns the nodes of leaves that nobody sees."""
        return {target for node in list(self.receive_of) for target, _ in node.next_functions}

    def accumulate(self, tensor: Tensor, gradient: Tensor) -> None:
        """Adds to the gradient of a tensor."""
        self.gradients.add(tensor, gradient)

    def get_gradients(self) -> dict[Tensor, Tensor]:
        """Returns the gradients that backward passes of this context left on this worker."""
        return self.gradients.snapshot()

    def clear(self) -> None:
        """Lets go of all graphs and gradients."""
        with self._lock:
            self._is_cleared = True
            self._sends.clear()
            self._receives.clear()
            self.receive_of = {}
            self.maps = []
        self.gradients.clear()


def send_record(message_id: int, to_worker: int, tensors: Sequence[Tensor]) -> SendRecord:
    """Makes the record of a message with ``tensors``, which require grad."""
    edges, owners = _edges_of(tensors)
    return SendRecord(message_id, to_worker, edges, metas_of(tensors), owners)


def _edges_of(tensors: Sequence[Tensor]) -> tuple[tuple[GradientEdge, ...], tuple[Node, ...]]:
    edges: list[GradientEdge] = []
    owners: list[Node] = []
    for tensor in tensors:
        node = tensor.grad_fn
        if node is not None and not isinstance(node, torch._C._FunctionBase):
            edges.append(GradientEdge(node, tensor.output_nr))  # as below, without the detours
            continue
        edge = get_gradient_edge(tensor)
        edges.append(edge)
        # A Python node does not keep its graph alive. Newer torch puts one in the edge that does.
        if isinstance(edge.node, torch._C._FunctionBase) and len(edge) == 2:
            with torch.enable_grad():
                owner = tensor.view_as(tensor).grad_fn
            assert owner is not None
            owners.append(owner)
    return tuple(edges), tuple(owners)


def metas_of(tensors: Iterable[Tensor]) -> tuple[TensorMeta, ...]:
    """Returns what gradients of ``tensors`` must look like."""
    return tuple([TensorMeta(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors])


class Contexts:
    """The contexts that one worker takes part in; thread-safe.

    Args:
        worker: This worker.
        remembered: How many released contexts are remembered, so that late messages of one do
            not bring it back.
    """

    def __init__(self, worker: int, remembered: int = 4096) -> None:
        self.worker = worker
        self._lock = threading.Lock()
        self._contexts: dict[int, Context] = {}
        self._released = Tombstones(remembered)
        self._context_counter = itertools.count(1)
        self.message_counter = itertools.count(1)
        """Makes the numbers of messages."""

    def open(self) -> int:
        """Makes a context and returns its number, which is new in the group."""
        context_id = scoped_id(self.worker, next(self._context_counter))
        self.get_or_create(context_id)
        return context_id

    def get_or_create(self, context_id: int) -> Context:
        """Returns a context that this worker, or another one, has opened.

        Raises:
            AutogradError: If it has been released here.
        """
        # A plain read of a dict is safe beside writers, and this is on the path of every call.
        context = self._contexts.get(context_id)
        if context is not None:
            return context
        with self._lock:
            if context_id in self._released:
                raise _released_error(context_id)
            return self._contexts.setdefault(
                context_id, Context(context_id, self.worker, self.message_counter)
            )

    def get(self, context_id: int) -> Context:
        """Returns a context that must exist here.

        Raises:
            AutogradError: If it was never used here, or has been released.
        """
        context = self._contexts.get(context_id)
        if context is None:
            raise _released_error(context_id)
        return context

    def release(self, context_id: int) -> frozenset[int]:
        """Lets go of a context, for good.

        Returns:
            The workers to tell; none if it was released before or never known here.
        """
        with self._lock:
            context = self._contexts.pop(context_id, None)
            self._released.add(context_id)
        if context is None:
            return frozenset()
        context.clear()
        return context.known_workers

    def ids(self) -> list[int]:
        """Returns the numbers of all contexts that are alive here."""
        with self._lock:
            return list(self._contexts)


def _released_error(context_id: int) -> AutogradError:
    return AutogradError(
        f"Could not find autograd context with id: {context_id}; it is not alive here, use its "
        "number only inside the `with torchweft.autograd.context()` block that opened it"
    )


# Of Python's own context, which each thread and each task has: tasks that take turns on a thread
# stay apart, and what is run in a copy of it records into the same.
_current: ContextVar[int] = ContextVar("torchweft autograd context", default=0)

current_id: Callable[[], int] = _current.get
"""Returns the context that this thread or task records into, or 0."""


set_current_id: Callable[[int], object] = _current.set
"""Makes this thread or task record into a context from now on; 0 for none."""


@contextlib.contextmanager
def enter(context_id: int) -> Iterator[None]:
    """Makes this thread or task record into a context within a ``with`` block."""
    before = _current.set(context_id)
    try:
        yield
    finally:
        _current.reset(before)
