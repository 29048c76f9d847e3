"""What is recorded of messages that are sent outside of autograd contexts.

In a context, whoever leaves the block tells all workers to let go of what they recorded. Outside
there is no such moment, so each record lives as long as it can be of use: that of the receiver for
as long as any graph leads to a tensor of the message, that of the sender until the receiver says
that its own has ended, or is lost. Any pass may go through these records, in a context or not.

Rules of the file: nothing here keeps a received tensor or its graph alive. The end of a graph may
come in any thread, within any lock; so it only enqueues.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from torchweft.autograd.contexts import (
    ReceiveRecord,
    SendRecord,
    TensorMeta,
    metas_of,
    send_record,
)
from torchweft.autograd.placeholders import PLACEHOLDER
from torchweft.ids import scoped_id

_KEY = "torchweft"
"""In the dictionary that each node of torch has: to which message its tensor belongs."""

_NEITHER = (None, 0)


class _Message:
    """A received message. The nodes of its tensors keep it, and nothing else does."""

    __slots__ = ("from_worker", "message_id", "metas", "records")

    def __init__(
        self,
        message_id: int,
        from_worker: int,
        metas: tuple[TensorMeta, ...],
        records: OutsideRecords,
    ) -> None:
        self.message_id = message_id
        self.from_worker = from_worker
        self.metas = metas
        self.records = records

    def __del__(self) -> None:
        self.records.give_back(self.from_worker, self.message_id)


def _notes_of(node: Node) -> dict[str, Any]:
    notes: Any = node.metadata  # torch says that it is a method
    return notes  # type: ignore[no-any-return]


class OutsideRecords:
    """What one worker sent and received outside of contexts. Thread-safe.

    Args:
        worker: This worker.
        counter: Makes the numbers of messages, those of contexts included.
    """

    def __init__(self, worker: int, counter: Iterator[int] | None = None) -> None:
        self._worker = worker
        self._counter = itertools.count(1) if counter is None else counter
        self._lock = threading.Lock()
        self._sends: dict[int, SendRecord] = {}
        self._ended: deque[tuple[int, int]] = deque()
        self._received: set[int] = set()
        self.on_ended: Callable[[], None] | None = None
        """Called, perhaps by a finalizer, when there is something for ``take_ended``."""

    def record_send(self, tensors: Sequence[Tensor], to_worker: int) -> int:
        """Records a message that is about to be sent; returns its number.

        Args:
            tensors: Those that require grad.
            to_worker: Who will receive it.
        """
        # next() of itertools.count is one bytecode: atomic under the interpreter lock.
        message_id = scoped_id(self._worker, next(self._counter))
        record = send_record(message_id, to_worker, tensors)
        with self._lock:
            self._sends[message_id] = record
        return message_id

    def take_back(self, message_id: int) -> None:
        """Lets go of a message that could not be sent."""
        with self._lock:
            record = self._sends.pop(message_id, None)
        del record  # outside the lock, as below

    def place_received(
        self, message_id: int, from_worker: int, tensors: Sequence[Tensor], nodes: Sequence[Node]
    ) -> None:
        """Records a message that was received.

        Args:
            message_id: What ``record_send`` returned at the sender.
            from_worker: The sender.
            tensors: What was received of those that required grad.
            nodes: Their placeholders.
        """
        message = _Message(message_id, from_worker, metas_of(tensors), self)
        self._received.add(message_id)
        for place, node in enumerate(nodes):
            _notes_of(node)[_KEY] = (message, place)

    def give_back(self, from_worker: int, message_id: int) -> None:
        """Notes that a message was received and cannot be used any more. For finalizers, too."""
        self._ended.append((from_worker, message_id))
        if self.on_ended is not None:
            self.on_ended()

    def take_ended(self) -> dict[int, list[int]]:
        """Returns the messages that nobody here can use any more, by sender."""
        ended: defaultdict[int, list[int]] = defaultdict(list)
        for _ in range(len(self._ended)):
            from_worker, message_id = self._ended.popleft()
            ended[from_worker].append(message_id)
            self._received.discard(message_id)
        return ended

    def drop_sends(self, message_ids: Iterable[int], to_worker: int) -> None:
        """Lets go of messages that a worker has received and cannot use any more."""
        with self._lock:
            records = [self._sends.get(message_id) for message_id in message_ids]
            ended = [each for each in records if each is not None and each.to_worker == to_worker]
            for record in ended:
                del self._sends[record.message_id]
        # What they kept ends here, outside the lock: it may run any code.

    def worker_lost(self, worker: int) -> None:
        """Lets go of all that was sent to a worker."""
        with self._lock:
            ended = [each.message_id for each in self._sends.values() if each.to_worker == worker]
        self.drop_sends(ended, worker)

    def send(self, message_id: int) -> SendRecord | None:
        """Returns what was recorded of a message that was sent here."""
        return self._sends.get(message_id)

    def sends(self) -> list[SendRecord]:
        """Returns all messages that were sent here and may be of use."""
        if not self._sends:
            return []
        with self._lock:
            return list(self._sends.values())

    def count(self) -> tuple[int, int]:
        """Returns how many messages are recorded as sent, and as received."""
        return len(self._sends), len(self._received)

    def ends_beside(
        self, receive_of: Mapping[Node, ReceiveRecord], on_reached: Callable[[int], None]
    ) -> Mapping[Node, Any]:
        """Returns where walks of a pass end: at the receives of a context, and at those here.

        Args:
            receive_of: Those of the context; may grow meanwhile.
            on_reached: Called with the sender of each message of these records that is reached.
        """
        return _Ends(self, receive_of, on_reached) if self._received else receive_of


class _Ends(Mapping[Node, Any]):
    """The ends of walks in one pass; it keeps those that are reached until it is over itself."""

    def __init__(
        self,
        records: OutsideRecords,
        receive_of: Mapping[Node, ReceiveRecord],
        on_reached: Callable[[int], None],
    ) -> None:
        self._outside = records
        self._receive_of = receive_of
        self._on_reached = on_reached
        self._found: dict[Node, ReceiveRecord] = {}
        self._records: dict[int, ReceiveRecord] = {}

    def get(self, node: Node, default: Any = None) -> Any:
        record = self._receive_of.get(node) or self._found.get(node)
        if record is not None:
            return record
        if type(node) is not PLACEHOLDER:
            return default
        message, place = _notes_of(node).get(_KEY, _NEITHER)
        # That of an earlier group of this process leads nowhere.
        if message is None or message.records is not self._outside:
            return default
        return self._reached(node, message, place)

    def _reached(self, node: Node, message: _Message, place: int) -> ReceiveRecord:
        record = self._records.get(message.message_id)
        if record is None:
            self._on_reached(message.from_worker)
            nodes: list[Any] = [None] * len(message.metas)
            record = ReceiveRecord(message.message_id, message.from_worker, nodes, message.metas)
            self._records[message.message_id] = record
        record.nodes[place] = node
        self._found[node] = record
        return record

    def __contains__(self, node: object) -> bool:
        return self.get(node) is not None  # type: ignore[arg-type]

    def __getitem__(self, node: Node) -> Any:
        record = self.get(node)
        if record is None:
            raise KeyError(node)
        return record

    def __iter__(self) -> Iterator[Node]:
        return iter({**self._receive_of, **self._found})

    def __len__(self) -> int:
        return len({**self._receive_of, **self._found})
