"""Contexts: a worker's record of one forward pass, and the resulting gradients.

A context has one number in the whole group and a ``Context`` on each worker that took part. It
holds the records of the worker's messages, which backward passes follow in the opposite direction.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from torchweft.autograd.gradients import Gradients
from torchweft.autograd.records import (
    ReceiveRecord,
    SendRecord,
    edges_behind,
    make_placeholders,
    metas_of,
    send_record,
)
from torchweft.errors import AutogradError
from torchweft.free_threading import shared_count
from torchweft.ids import WORKER_SHIFT, scoped_id, worker_of
from torchweft.protocol.numbers import Tombstones
from torchweft.serialize.table import PARAMETER, REQUIRES_GRAD, SHARED, separated


class Context:
    """One worker's part of a context. Thread-safe.

    Args:
        context_id: Number of the context in the group.
        worker: This worker.
        counter: Makes the numbers of messages; shared by all contexts of the worker.
    """

    def __init__(self, context_id: int, worker: int, counter: Iterator[int] | None = None) -> None:
        self.id = context_id
        self.worker = worker
        self.gradients = Gradients(calls_hooks=False)
        self.receive_of: dict[Node, ReceiveRecord] = {}
        """Receives by placeholder nodes; graph walks end at these."""
        self.maps: list[Any] = []
        """Maps of this worker that can be repeated if other workers are lost; see mapreduce."""
        self.is_differentiated_twice = False
        """Whether a pass through this context was itself recorded (``create_graph``)."""
        self._counter = shared_count(1) if counter is None else counter
        self._lock = threading.RLock()
        self._sends: dict[int, SendRecord] = {}
        self.send: Callable[[int], SendRecord | None] = self._sends.get
        """Returns the record of a message that this worker sent."""
        self._receives: dict[int, ReceiveRecord] = {}
        self._known_workers: set[int] = set()
        self._is_cleared = False

    def record_send(self, tensors: Iterable[Tensor], to_worker: int, is_back: bool = False) -> int:
        """Records a message that is about to be sent.

        Args:
            tensors: All tensors of the message; tensors that do not require grad are skipped.
            to_worker: The receiver.
            is_back: Whether they are placed as those of an answer.

        Returns:
            The number of the message, or 0 if none of its tensors requires grad.
        """
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        self.add_known_worker(to_worker)
        if not differentiable:
            return 0
        # Before the lock: no two threads get the same number.
        message_id = scoped_id(self.worker, next(self._counter))
        record = send_record(message_id, to_worker, differentiable, is_back)
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
        is_back: bool = False,
    ) -> list[Tensor]:
        """Records a received message, and replaces its tensors by placeholders.

        Args:
            message_id: The number that ``record_send`` returned at the sender.
            from_worker: The sender.
            tensors: All tensors of the message, as received. Tensors with ``REQUIRES_GRAD`` are
                consumed: only the returned tensors may be used afterwards.
            flags: ``REQUIRES_GRAD``, ``PARAMETER`` and ``SHARED`` of each tensor at the sender.
            is_answer: Whether the message is the result of a call.
            is_back: Whether its tensors were placed as those of an answer.

        Returns:
            The tensors for the program.
        """
        self.add_known_worker(from_worker)
        result = list(tensors)
        places = [place for place, flag in enumerate(flags) if flag & REQUIRES_GRAD]
        if message_id and places:
            for place in places:
                # Each placeholder has its own graph, so it needs its own memory: an in-place
                # change of one tensor would not appear in the graph of the other.
                if flags[place] & SHARED:
                    result[place] = separated(result[place])
            self.place_received(message_id, from_worker, result, places, is_answer, is_back)
        for tensor, flag in zip(result, flags, strict=True):
            if flag & PARAMETER:
                # isinstance(tensor, torch.nn.Parameter) checks this attribute.
                tensor._is_param = True
        return result

    def place_received(
        self,
        message_id: int,
        from_worker: int,
        values: list[Any],
        places: Sequence[int],
        is_answer: bool = False,
        is_back: bool = False,
    ) -> None:
        """Records the tensors of a received message that required grad at a known worker.

        Args:
            message_id: The number that ``record_send`` returned at the sender.
            from_worker: The sender.
            values: The received values; placeholders replace the tensors at ``places``.
            places: Positions of these tensors in ``values``.
            is_answer: Whether the message is the result of a call.
            is_back: Whether its tensors were placed as those of an answer.
        """
        tensors = [values[place] for place in places]
        metas = metas_of(tensors)
        nodes, placeholders = make_placeholders(tensors)
        before = len(self._sends)
        record = ReceiveRecord(
            message_id, from_worker, nodes, metas, before, is_answer, is_answer or is_back
        )
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
        # An unlocked test is safe: one add to a set is atomic. Adds and copies take the lock.
        if worker != self.worker and worker not in self._known_workers:
            with self._lock:
                if self._is_cleared:  # The release was sent already and would miss this worker.
                    raise _released_error(self.id)
                self._known_workers.add(worker)

    @property
    def known_workers(self) -> frozenset[int]:
        """The other workers with which this worker exchanged messages of the context."""
        with self._lock:
            return frozenset(self._known_workers)

    def sends(self) -> list[SendRecord]:
        """Returns the records of all messages that this worker sent, with their edges."""
        with self._lock:
            sends = list(self._sends.values())
        for send in sends:
            if not send.edges:
                send.edges = edges_behind(send.gates)
        return sends

    def receive(self, message_id: int) -> ReceiveRecord | None:
        """Returns the record of a message that this worker received."""
        return self._receives.get(message_id)

    def receives(self) -> list[ReceiveRecord]:
        """Returns the records of all messages that this worker received."""
        with self._lock:
            return list(self._receives.values())

    def has_both_ways(self) -> bool:
        """Returns whether this worker both sent and received tensors with a graph."""
        return bool(self._sends and self.receive_of)

    def leaves_behind_placeholders(self) -> set[Node | None]:
        """Returns the nodes of the hidden leaves behind the placeholders."""
        return {target for node in list(self.receive_of) for target, _ in node.next_functions}

    def get_gradients(self) -> dict[Tensor, Tensor]:
        """Returns the gradients that backward passes of this context left on this worker."""
        return self.gradients.snapshot()

    def clear(self) -> None:
        """Releases all graphs and gradients."""
        with self._lock:
            self._is_cleared = True
            self._sends.clear()
            self._receives.clear()
            self.receive_of = {}
            self.maps = []
        self.gradients.clear()


class Contexts:
    """The contexts in which one worker takes part. Thread-safe.

    Args:
        worker: This worker.
        remembered: How many released contexts are remembered, so that their late messages do
            not recreate them.
        is_lost: Whether a worker, given by id, is lost: nobody would release its contexts.
    """

    def __init__(
        self,
        worker: int,
        remembered: int = 4096,
        is_lost: Callable[[int], bool] = lambda worker: False,
    ) -> None:
        self.worker = worker
        self._is_lost = is_lost
        # Reentrant: a signal handler that calls may interrupt the main thread within it.
        self._lock = threading.RLock()
        self._contexts: dict[int, Context] = {}
        self.find: Callable[[int], Context | None] = self._contexts.get
        """Returns a context, or None if it is not alive here."""
        self._releasing: dict[int, Context] = {}
        """Contexts that are released here while not all other workers may have been told."""
        self._released = Tombstones(remembered)
        self.message_counter = shared_count(1)
        """Makes the numbers of messages."""

    def open(self) -> int:
        """Makes a context and returns its number, which is new in the group."""
        context_id = self.new_id()
        self.get_or_create(context_id)
        return context_id

    def new_id(self) -> int:
        """Returns the number of a context that is yet to be made; it is new in the group.

        All but the worker is random: a member that takes no part in the context cannot name it.
        """
        return scoped_id(self.worker, secrets.randbits(WORKER_SHIFT))

    def get_or_create(self, context_id: int, named_by: int | None = None) -> Context:
        """Returns a context that this or another worker opened; creates it here if missing.

        Args:
            context_id: Its number.
            named_by: The worker whose message names it, if this worker has not heard of it before.

        Raises:
            AutogradError: If it has been released here, or ``named_by`` has released it; or it is
                a context of this worker, which ``named_by`` has made up; or the worker that opened
                it is lost.
        """
        # Every call comes here, so read without the lock: a dict read is safe beside writers.
        context = self._contexts.get(context_id)
        if context is not None:
            return context
        with self._lock:
            is_made_up = named_by is not None and worker_of(context_id) == self.worker
            is_released = context_id in self._released or (context_id, named_by) in self._released
            if is_made_up or is_released or self._is_lost(worker_of(context_id)):
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

    def release(self, context_id: int, told_by: int | None = None) -> frozenset[int]:
        """Releases a context permanently, unless the worker that says so has no say in it.

        The opener of a context releases it. A worker that it told tells those with which it has
        exchanged messages of the context; of these, those that know the opener wait for the opener.

        Args:
            context_id: The context.
            told_by: The worker that said so; None for this worker.

        Returns:
            The workers to notify, again until ``notified`` is called; none if that was called, or
            the context was never known here.
        """
        opener = worker_of(context_id)
        with self._lock:
            if told_by is not None and told_by != opener:
                known = self._contexts.get(context_id)
                if known is None:
                    # Perhaps a message of the context is not read yet. It must not open it again.
                    self._released.add((context_id, told_by))
                    return frozenset()
                workers = known.known_workers
                waits = opener == self.worker or (opener in workers and not self._is_lost(opener))
                if waits or told_by not in workers:
                    return frozenset()
            context = self._contexts.get(context_id) or self._releasing.get(context_id)
            if context is not None:
                self._releasing[context_id] = context
            self._contexts.pop(context_id, None)
            self._released.add(context_id)
        if context is None:
            return frozenset()
        context.clear()
        return context.known_workers

    def all(self) -> list[Context]:
        """Returns all contexts that are alive here."""
        with self._lock:
            return list(self._contexts.values())

    def notified(self, context_id: int) -> None:
        """Forgets a released context: the other workers have been told."""
        self._releasing.pop(context_id, None)

    def opened_by(self, worker: int) -> list[int]:
        """Returns the numbers of the contexts that are alive here and that a worker opened."""
        return [context_id for context_id in self.ids() if worker_of(context_id) == worker]

    def ids(self) -> list[int]:
        """Returns the numbers of all contexts that are alive here."""
        with self._lock:
            return list(self._contexts)


def _released_error(context_id: int) -> AutogradError:
    return AutogradError(
        f"Could not find autograd context with id: {context_id}; it is not alive here, use its "
        "number only inside the `with torchweft.autograd.context()` block that opened it"
    )


# A context variable, so that tasks that share a thread stay apart. Code that runs in a copy of the
# Python context records into the same autograd context.
_current: ContextVar[int] = ContextVar("torchweft autograd context", default=0)

current_id: Callable[[], int] = _current.get
"""Returns the context that this thread or task records into, or 0."""


set_current_id: Callable[[int], object] = _current.set
"""Makes this thread or task record into a context from now on; 0 for none."""


class enter:
    """Makes this thread or task record into a context within a ``with`` block."""

    def __init__(self, context_id: int) -> None:
        self._context_id = context_id

    def __enter__(self) -> None:
        self._before = _current.set(self._context_id)

    def __exit__(self, *failure: object) -> None:
        _current.reset(self._before)
