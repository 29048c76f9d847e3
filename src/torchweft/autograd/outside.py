"""Messages that are sent outside of autograd contexts: their records, and the arriving tensors.

The worker that leaves a context's block tells all workers to release their records. Outside of
contexts there is no such moment, so each record lives while it can be of use. A receive record
lives while any graph leads to a tensor of the message. A send record lives until the receiver
reports the end of its receive record, or is lost. Any pass may go through these records, in a
context or not.

Rules of the file: nothing here keeps a received tensor or its graph alive. A graph may be freed in
any thread, under any lock; so its finalizer only enqueues. It is a function of C: Python ignores an
interrupt that ends a finalizer.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from torchweft.autograd.contexts import (
    PLACEHOLDER,
    Context,
    ReceiveRecord,
    SendRecord,
    SentMessages,
    make_placeholders,
)
from torchweft.engine.wire.messages import NO_GRAD
from torchweft.errors import AutogradError

_KEY = "torchweft"
"""Key in the metadata of a torch node: the message of its tensor, and the position there."""

_NEITHER = (None, 0)


@dataclass(eq=False)
class _Message:
    """A received message. Only the nodes of its tensors keep it alive."""

    __slots__ = ("__weakref__", "count", "from_worker", "is_back", "message_id", "records")

    message_id: int
    from_worker: int
    count: int
    records: OutsideRecords
    is_back: bool


class _End(weakref.ref[_Message]):
    """Is put into a queue when a message has become unreachable."""

    __slots__ = ("is_back", "place")

    is_back: bool
    place: tuple[int, int]
    """The sender and the number of the message."""


def _notes_of(node: Node) -> dict[str, Any]:
    notes: Any = node.metadata  # torch declares it as a method
    return notes  # type: ignore[no-any-return]


class OutsideRecords(SentMessages):
    """Records of what one worker sent and received outside of contexts. Thread-safe.

    Args:
        worker: This worker.
        counter: Makes the numbers of messages, those of contexts included.
    """

    def __init__(self, worker: int, counter: Iterator[int] | None = None) -> None:
        super().__init__(worker, counter)
        self.ended: deque[_End | tuple[int, int]] = deque()
        """What ``take_ended`` returns next."""
        self.received: dict[int, tuple[_End, object]] = {}
        """By the number of a received message, what notices its end, and what tells of that."""
        self.on_ended: Callable[[], None] | None = None
        """Called, perhaps by a finalizer, when ``take_ended`` has new messages to return."""

    def find(self, message_id: int, context: Context | None) -> SendRecord | None:
        """Returns the record of a message that was sent in a context, or outside of contexts."""
        record = None if context is None else context.send(message_id)
        return self.send(message_id) if record is None else record

    def take_back(self, message_id: int) -> None:
        """Drops the record of a message that could not be sent."""
        with self._lock:
            record = self._sends.pop(message_id, None)
        del record  # Outside the lock: freeing a graph may run any code.

    def place_received(
        self,
        message_id: int,
        from_worker: int,
        nodes: Sequence[Node],
        is_back: bool = False,
    ) -> None:
        """Records a received message.

        Args:
            message_id: The number that ``record_send`` returned at the sender.
            from_worker: The sender.
            nodes: The placeholders of its tensors.
            is_back: Whether the tensors were placed as those of an answer.
        """
        message = _Message(message_id, from_worker, len(nodes), self, is_back)
        # In steps of C: the caller gives the message back if it is interrupted before the last.
        end = _End(message, self.ended.append)
        end.place, end.is_back = (from_worker, message_id), is_back
        self.received[message_id] = end, weakref.ref(message, self._tell)
        for place, node in enumerate(nodes):
            _notes_of(node)[_KEY] = (message, place)

    def give_back(self, from_worker: int, message_id: int) -> None:
        """Notes that a received message is unreachable here. Finalizers may call it."""
        self.ended.append((from_worker, message_id))
        self._tell(None)

    def _tell(self, _: object) -> None:
        if self.on_ended is not None:
            self.on_ended()

    def take_ended(self) -> dict[int, list[int]]:
        """Removes and returns the messages that became unreachable here, by sender."""
        ended: defaultdict[int, list[int]] = defaultdict(list)
        for _ in range(len(self.ended)):
            end = self.ended.popleft()
            place = end if isinstance(end, tuple) else end.place
            from_worker, message_id = place
            ended[from_worker].append(message_id)
            received = self.received.get(message_id)
            if received is not None and received[0].place == place:
                del self.received[message_id]
        return ended

    def drop_sends(self, message_ids: Iterable[int], to_worker: int) -> None:
        """Drops the records of messages that are unreachable at their receiver ``to_worker``."""
        with self._lock:
            records = [self._sends.get(message_id) for message_id in set(message_ids)]
            ended = [each for each in records if each is not None and each.to_worker == to_worker]
            for record in ended:
                self._sends.pop(record.message_id, None)  # A number may come twice.
        # The graphs are freed here, outside the lock: that may run any code.

    def worker_lost(self, worker: int) -> list[int]:
        """Drops the records of all messages sent to a worker; returns their numbers."""
        with self._lock:
            ended = [each.message_id for each in self._sends.values() if each.to_worker == worker]
        self.drop_sends(ended, worker)
        return ended

    def is_back(self, message_id: int) -> bool:
        """Returns whether the tensors of a received message were placed as those of an answer."""
        received = self.received.get(message_id)
        return received is not None and received[0].is_back

    def count(self) -> tuple[int, int]:
        """Returns the number of sent and of received messages on record."""
        return len(self._sends), len(self.received)


class Ends:
    """The ends of walks in one pass: the receives of a context, and reached ones of records here.

    Keeps the reached nodes alive for as long as it lives.

    Args:
        records: The records.
        receive_of: The receives of the context; may grow during the pass.
        on_reached: Called with the sender of each message that is reached in the records.
    """

    def __init__(
        self,
        records: OutsideRecords,
        receive_of: Mapping[Node, ReceiveRecord],
        on_reached: Callable[[int], None],
    ) -> None:
        self._outside = records
        self._receive_of = receive_of
        self._on_reached = on_reached
        self._records: dict[int, ReceiveRecord] = {}
        self._reached: dict[Node, ReceiveRecord] = {}

    def get(self, node: Node) -> ReceiveRecord | None:
        """Returns the record of a received message by a placeholder of it."""
        record = self._receive_of.get(node) or self._reached.get(node)
        if record is not None or type(node) is not PLACEHOLDER:
            return record
        message, place = _notes_of(node).get(_KEY, _NEITHER)
        # A message of an earlier group of this process leads nowhere.
        if message is None or message.records is not self._outside:
            return None
        record = self._records.get(message.message_id)
        if record is None:
            self._on_reached(message.from_worker)
            record = self._records[message.message_id] = ReceiveRecord(
                message.message_id,
                message.from_worker,
                [None] * message.count,  # type: ignore[list-item]
                is_back=message.is_back,
                is_outside=True,
            )
        record.nodes[place] = node
        self._reached[node] = record
        return record

    def forget(self, nodes: Iterable[Node]) -> None:
        """Lets go of reached nodes, with all others of their messages."""
        for node in nodes:
            record = self._reached.get(node)
            if record is not None:
                self._records.pop(record.message_id, None)
                for each in record.nodes:
                    self._reached.pop(each, None)


# Arriving tensors


class Arrivals:
    """Prepares received tensors that have a graph at their sender but belong to no context.

    Such a tensor was *computed*: it requires grad at its sender and is not a leaf. The local engine
    does not know that graph, so a local pass that reaches the tensor would silently lose the
    gradient. The tensor can be used like any other, but it is marked: a local pass that reaches it
    raises an error that names the remedy. ``torchweft.autograd.backward`` continues at the sender.
    A leaf of the sender arrives as a separate leaf. Thread-safe.

    Args:
        records: The worker's records of messages outside of contexts.
        warns: Whether to record nothing and make each tensor a leaf, as in
            ``torch.distributed.rpc``. The first pass that ends in such a leaf then warns instead
            of raising.
    """

    def __init__(self, records: OutsideRecords, warns: bool = False) -> None:
        self._records = records
        self.keeps_graphs = not warns
        """Whether gradients outside of contexts go back to the senders."""
        self._has_warned = False

    def place(
        self,
        values: list[Any],
        computed: Sequence[int],
        sender: str,
        worker: int,
        context_id: int,
        message_id: int,
        is_back: bool = False,
    ) -> None:
        """Replaces received tensors by tensors for the program, in place.

        Args:
            values: The received values, all tensors as leaves.
            computed: Positions in ``values`` of the tensors that have a graph at the sender.
            sender: The name of the worker that sent them.
            worker: Its rank.
            context_id: The context that the call named; with ``NO_GRAD`` the tensors become
                constants.
            message_id: The number of the sender's record of the message; 0 if it has none.
            is_back: Whether the tensors were placed as those of an answer.
        """
        if context_id:  # Its record belonged to a context that has ended.
            message_id = 0
        if context_id == NO_GRAD:
            for place in computed:
                values[place].requires_grad_(False)
        elif not self.keeps_graphs:
            if message_id:
                self._records.give_back(worker, message_id)
            for place in computed:
                self._mark_leaf(values[place], sender)
        elif computed:
            tensors = [values[place] for place in computed]
            nodes, placeholders = make_placeholders(tensors)
            if message_id:
                self._records.place_received(message_id, worker, nodes, is_back)
            for node in nodes:
                node.register_prehook(functools.partial(_refuse, sender, bool(message_id)))
            for place, tensor, placeholder in zip(computed, tensors, placeholders, strict=True):
                if isinstance(tensor, Parameter):
                    placeholder._is_param = True  # for isinstance
                values[place] = placeholder

    def _mark_leaf(self, tensor: Tensor, sender: str) -> None:
        def warn(_: object) -> None:
            if not self._has_warned:
                self._has_warned = True
                text = (
                    f"backward ended in a tensor that worker {sender!r} had computed outside of an "
                    "autograd context, so its gradient does not go back there; make the call "
                    "within a context, or detach() the tensor if it is meant to be a constant"
                )
                warnings.warn(text, RuntimeWarning, stacklevel=2)

        warn.__torch_unserializable__ = True  # type: ignore[attr-defined]  # and says nothing of it
        tensor.requires_grad_().register_hook(warn)  # type: ignore[no-untyped-call]


def _refuse(sender: str, is_recorded: bool, _: object) -> NoReturn:
    if is_recorded:
        raise AutogradError(
            f"this backward pass does not go on at worker {sender!r}, which had computed a tensor "
            "that it has reached: call torchweft.autograd.backward(loss) instead of "
            "loss.backward(), or detach() the tensor if it is meant to be a constant",
            worker=sender,
        )
    raise AutogradError(
        f"backward ended in a tensor that worker {sender!r} had computed, and had recorded "
        "nowhere, or in a context that is over by now. Make the call within `with "
        "torchweft.autograd.context() as context_id:`, and call backward(context_id, [loss]) "
        "there; or detach() the tensor if it is meant to be a constant",
        worker=sender,
    )
