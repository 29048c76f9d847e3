"""Joins the records of all workers: the two ends of each message, and the two sides of each call.

No id is added to a message for that. The caller and the number that a ``CALL`` and its ``REPLY``
carry are unique, as are the owner, creator and number of a value that is made, and the pass and the
message of gradients. All other messages of one kind and number between two workers keep their
order, so the first that was sent is the first that was read.

All times of the results are those of the worker that leads the trace, in seconds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchweft.engine.wire.messages import NO_CREATION, Kind
from torchweft.observe.tracing.records import (
    Alignment,
    Created,
    Made,
    Offered,
    Profiled,
    Pulled,
    Ran,
    Received,
    Sent,
    Served,
    WorkerTrace,
)

_REPLY, _GRADIENTS = int(Kind.REPLY), int(Kind.GRADIENTS)

_SERVICE = "torchweft.observe.tracing.recorder."
"""Begins the names of the functions by which workers are traced."""

Key = tuple[Any, ...]


@dataclass(slots=True)
class Message:
    """A message between two workers.

    Attributes:
        sender: The id of the sender.
        receiver: The id of the receiver.
        kind: The number of its kind.
        number: The number in it: of a call, a pass or a port.
        size_bytes: Its bytes on the connection.
        context_id: Its autograd context, or 0.
        message_id: Its recorded message, or that which its gradients belong to; or 0.
        creation: The number of the reference that it creates, or -1.
        sent: The record of its sender; None if that is missing.
        received: The record of its receiver; None if that is missing.
        channels: Bytes of tensors in it or beside it, by channel.
    """

    sender: int
    receiver: int
    kind: int
    number: int
    size_bytes: int
    context_id: int
    message_id: int
    creation: int
    sent: Sent | None = None
    received: Received | None = None
    channels: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kind of the message, in small letters."""
        try:
            return Kind(self.kind).name.lower().replace("_", " ")
        except ValueError:
            return f"message of kind {self.kind}"

    @property
    def at_s(self) -> float:
        """When it was sent, or else received."""
        if self.sent is not None:
            return self.sent.began_s
        assert self.received is not None
        return self.received.at_s


@dataclass(slots=True)
class Call:
    """A call, as far as it was recorded.

    Attributes:
        caller: The id of the caller.
        callee: The id of the callee.
        number: Its number; 0 for one that makes a value.
        creation: The number of the reference that it makes, or -1.
        function: The name of its function.
        made: The record of the caller; None if that is missing.
        created: The same for a call that makes a value.
        served: The record of the callee; None if that is missing.
        request: Its message; None if it is missing, or the caller calls itself.
        answer: The message with its result.
    """

    caller: int
    callee: int
    number: int
    creation: int
    function: str
    made: Made | None = None
    created: Created | None = None
    served: Served | None = None
    request: Message | None = None
    answer: Message | None = None

    @property
    def key(self) -> str:
        """Names the call: the same text for its caller and its callee."""
        if self.number:
            return f"{self.caller}.{self.number}"
        return f"{self.caller}.{self.callee}.{self.creation}"

    @property
    def context_id(self) -> int:
        """The autograd context of the call, or 0."""
        if self.request is not None:
            return self.request.context_id
        return self.served.context_id if self.served is not None else 0


@dataclass(slots=True)
class Joined:
    """A trace of all workers, at the time of the worker that leads it.

    Attributes:
        workers: The workers by id, with their records at the common time.
        calls: The calls of the program.
        messages: All messages but those of the trace's own calls.
        omitted: Messages of the trace's own calls.
    """

    workers: dict[int, WorkerTrace]
    calls: list[Call]
    messages: list[Message]
    omitted: list[Message]

    def name_of(self, worker: int) -> str:
        """Returns the name of a worker."""
        for each in self.workers.values():
            if worker in each.peers:
                return each.peers[worker]
        return f"worker {worker}"


def join(traces: Iterable[tuple[WorkerTrace, Alignment]]) -> Joined:
    """Joins what all workers have recorded.

    Args:
        traces: The record of each worker, and the alignment of its clock.
    """
    workers = {each.id: _aligned(each, alignment) for each, alignment in traces}
    own = set().union(*map(_own_calls, workers.values()))
    messages: list[Message] = []
    omitted: list[Message] = []
    for message in _messages(workers):
        (omitted if _call_of(message) in own else messages).append(message)
    calls = _calls(workers, messages, own)
    return Joined(workers, calls, messages, omitted)


def _own_calls(worker: WorkerTrace) -> set[tuple[int, int]]:
    """Returns callers and numbers of calls that belong to this or another trace."""
    own = set(worker.own_calls)
    for record in worker.records:
        if isinstance(record, Made) and record.function.startswith(_SERVICE):
            own.add((worker.id, record.number))
        elif isinstance(record, Served) and record.function.startswith(_SERVICE):
            own.add((record.caller, record.number))
    return own


_TIMES: dict[type, tuple[int, ...]] = {
    Made: (0, 1),
    Created: (0,),
    Served: (0, 1, 2, 3),
    Sent: (0, 1),
    Received: (0,),
    Offered: (0,),
    Pulled: (0,),
    Ran: (0, 1),
    Profiled: (0, 1),
}
"""The places of the times in each record."""


def _aligned(trace: WorkerTrace, alignment: Alignment) -> WorkerTrace:
    def move(record: Any) -> Any:
        values = list(record)
        for place in _TIMES[type(record)]:
            values[place] = alignment.own(values[place])
        return type(record)._make(values)

    return trace._replace(
        began_s=alignment.own(trace.began_s),
        ended_s=alignment.own(trace.ended_s),
        records=[move(each) for each in trace.records],
        profiled=[move(each) for each in trace.profiled],
    )


# Messages


def _messages(workers: Mapping[int, WorkerTrace]) -> list[Message]:
    waiting: dict[Key, deque[Message]] = defaultdict(deque)
    found: list[Message] = []
    for worker in workers.values():
        for message in _sent_by(worker):
            found.append(message)
            waiting[_key_of(message)].append(message)
    for worker in workers.values():
        for record in worker.records:
            if isinstance(record, Received):
                message = _received_by(worker.id, record)
                known = _take(waiting.get(_key_of(message)), record)
                if known is None:
                    found.append(message)
                else:
                    known.received = record
    found.sort(key=lambda each: each.at_s)
    return found


def _sent_by(worker: WorkerTrace) -> Iterator[Message]:
    offered: dict[Key, deque[Offered]] = defaultdict(deque)
    for record in worker.records:
        if isinstance(record, Offered):
            offered[record.peer, record.kind, record.number].append(record)
        elif isinstance(record, Sent):
            message = Message(
                worker.id,
                record.peer,
                record.kind,
                record.number,
                record.size_bytes,
                record.context_id,
                record.message_id,
                record.creation,
                record,
            )
            inside = {"inline": record.inline_bytes, "stream": record.stream_bytes}
            message.channels = {name: count for name, count in inside.items() if count}
            apart = offered.get((record.peer, record.kind, record.number))
            if apart:
                message.channels.update(apart.popleft().channels)
            yield message


def _received_by(worker: int, record: Received) -> Message:
    return Message(
        record.peer,
        worker,
        record.kind,
        record.number,
        record.size_bytes,
        record.context_id,
        record.message_id,
        record.creation,
        None,
        record,
    )


def _take(waiting: deque[Message] | None, record: Received) -> Message | None:
    """Returns the message that a worker has received, out of those sent; None if none fits.

    One that was sent before the trace has no record of its sender. It is not mistaken for a later
    one if that has another size.
    """
    if waiting and waiting[0].size_bytes == record.size_bytes:
        return waiting.popleft()
    return None


def _key_of(message: Message) -> Key:
    ends = message.sender, message.receiver, message.kind, message.number
    if message.kind == _GRADIENTS:
        return (*ends, message.message_id)
    return (*ends, message.creation)


def _call_of(message: Message) -> tuple[int, int]:
    """Returns caller and number of the call that a message belongs to."""
    if message.kind == Kind.CALL and message.number:
        return message.sender, message.number
    if message.kind == _REPLY:
        return message.receiver, message.number
    return 0, 0


# Calls


def _calls(
    workers: Mapping[int, WorkerTrace], messages: Sequence[Message], own: set[tuple[int, int]]
) -> list[Call]:
    calls: dict[Key, Call] = {}

    def call_of(caller: int, callee: int, number: int, creation: int, function: str) -> Call:
        key = (caller, number) if number else (caller, callee, creation)
        call = calls.get(key)
        if call is None:
            call = calls[key] = Call(caller, callee, number, creation, function)
        return call

    for worker in workers.values():
        for record in worker.records:
            if isinstance(record, Made) and (worker.id, record.number) not in own:
                made = call_of(
                    worker.id, record.callee, record.number, NO_CREATION, record.function
                )
                made.made, made.function = record, record.function
            elif isinstance(record, Created):
                call = call_of(worker.id, record.owner, 0, record.number, record.function)
                call.created, call.function = record, record.function
            elif isinstance(record, Served) and (record.caller, record.number) not in own:
                call = call_of(
                    record.caller, worker.id, record.number, record.creation, record.function
                )
                call.served = record
    for message in messages:
        if message.kind == Kind.CALL:
            key: Key = (message.sender, message.number)
            if not message.number:
                key = (message.sender, message.receiver, message.creation)
            if key in calls:
                calls[key].request = message
        elif message.kind == _REPLY and (message.receiver, message.number) in calls:
            call = calls[message.receiver, message.number]
            # The first one: tensors that were asked for again come under another number.
            call.answer = call.answer or message
    return sorted(calls.values(), key=_time_of)


def _time_of(call: Call) -> float:
    if call.made is not None:
        return call.made.started_s
    if call.request is not None:
        return call.request.at_s
    if call.served is not None:
        return call.served.arrived_s
    assert call.created is not None
    return call.created.at_s
