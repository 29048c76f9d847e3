"""The records of a trace: what one worker notes while it is traced. Times are those of its clock.

A worker notes plain tuples: the number of the record, its tag, and the fields of one of the classes
below. They travel as they are, and ``read`` gives them names. No record has a value of the program:
only names of functions, numbers, sizes and times.

Clocks of two workers are compared by calls that read the other one, at an unknown moment of the
call. So its lead over the own clock lies in an interval as long as the call; the middle is wrong by
at most half of its length, and the shortest of several calls counts. Two such measurements, before
and after a trace, give the lead for all times in between, where both clocks run at constant rates
meanwhile. The error there is at most the larger one of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torchweft.engine.protocol.observing import Lead


class Alignment(NamedTuple):
    """Converts times of another worker's clock to the own one.

    Attributes:
        first: The lead before the times to convert.
        last: The lead after them.
    """

    first: Lead
    last: Lead

    @property
    def error_s(self) -> float:
        """By how much a converted time may be wrong, between both measurements."""
        return max(self.first.error_s, self.last.error_s)

    def own(self, their_s: float) -> float:
        """Returns the own time at which the other clock showed a time."""
        begin_s = self.first.at_s + self.first.ahead_s
        duration_s = self.last.at_s + self.last.ahead_s - begin_s
        if duration_s <= 0:
            return their_s - self.first.ahead_s
        share = (their_s - begin_s) / duration_s
        return self.first.at_s + share * (self.last.at_s - self.first.at_s)


SAME = Alignment(Lead(0.0, 0.0, 0.0), Lead(0.0, 0.0, 0.0))
"""The alignment of workers that read one clock."""


Row = tuple[Any, ...]

MADE, CREATED, SERVED, SENT, RECEIVED, OFFERED, PULLED, RAN = range(8)
"""The tags of the records."""


class Made(NamedTuple):
    """A call that this worker made and that has ended.

    Attributes:
        started_s: When its request had been made.
        ended_s: When it was answered, or failed.
        thread: The thread that made it.
        callee: The id of the other worker.
        number: Its number at both.
        function: The name of the function.
        parent_caller: The caller of the call in whose course it was made; -1 if there is none.
        parent_number: The number of that call; 0 if it makes a value.
        is_async: Whether its maker has a future, and did not wait in the call.
        failed: Whether it ended with an error.
    """

    started_s: float
    ended_s: float
    thread: int
    callee: int
    number: int
    function: str
    parent_caller: int
    parent_number: int
    is_async: bool
    failed: bool


class Created(NamedTuple):
    """A call of this worker that makes a value, for whose answer nobody waits.

    Attributes:
        at_s: When it had been sent.
        thread: The thread that made it.
        owner: The id of the worker where the value will be.
        number: The number of the reference to it.
        function: The name of the function.
    """

    at_s: float
    thread: int
    owner: int
    number: int
    function: str


class Served(NamedTuple):
    """A call that this worker has served.

    Attributes:
        arrived_s: When it was read.
        began_s: When its turn came.
        ended_s: When its function had ended.
        answered_s: When its answer had been written, or its value was kept.
        began_in: The thread in which it began.
        ended_in: The thread in which it ended; another one for a coroutine, for instance.
        caller: The id of the caller.
        number: Its number; 0 if it makes a value.
        creation: The number of the reference to the value that it makes, or -1.
        function: The name of the function.
        context_id: The autograd context of the call, or 0.
        failed: Whether it ended with an error.
    """

    arrived_s: float
    began_s: float
    ended_s: float
    answered_s: float
    began_in: int
    ended_in: int
    caller: int
    number: int
    creation: int
    function: str
    context_id: int
    failed: bool


class Sent(NamedTuple):
    """A message that this worker has written, or left to another thread to write.

    Attributes:
        began_s: When the thread had the message.
        ended_s: When it went on.
        thread: The thread.
        peer: The id of the receiver.
        kind: The kind of the message; see ``wire.messages.Kind``.
        number: The number in it: of a call, a pass or a port.
        size_bytes: All of its bytes on the connection.
        context_id: Its autograd context, or 0.
        message_id: Its recorded message, or that which its gradients belong to; or 0.
        creation: The number of the reference that it creates, or -1.
        inline_bytes: Bytes of small tensors inside of it, with their description.
        stream_bytes: Bytes of tensors behind it on the same connection.
    """

    began_s: float
    ended_s: float
    thread: int
    peer: int
    kind: int
    number: int
    size_bytes: int
    context_id: int
    message_id: int
    creation: int
    inline_bytes: int
    stream_bytes: int


class Received(NamedTuple):
    """A message that this worker has read; the fields are those of ``Sent``."""

    at_s: float
    thread: int
    peer: int
    kind: int
    number: int
    size_bytes: int
    context_id: int
    message_id: int
    creation: int


class Offered(NamedTuple):
    """Tensors of a message of this worker that go over other channels than its connection.

    Attributes:
        at_s: When their channels were chosen.
        thread: The thread that sends the message next.
        peer: The id of the receiver.
        kind: The kind of the message.
        number: The number of the message.
        channels: Names of the channels, each with its bytes.
    """

    at_s: float
    thread: int
    peer: int
    kind: int
    number: int
    channels: tuple[tuple[str, int], ...]


class Pulled(NamedTuple):
    """Tensors that this worker has fetched over a channel.

    Attributes:
        at_s: When they were there.
        thread: The thread that fetched them.
        peer: The id of the sender.
        channel: The name of the channel.
        size_bytes: Their bytes.
    """

    at_s: float
    thread: int
    peer: int
    channel: str
    size_bytes: int


class Ran(NamedTuple):
    """Work of a thread that is no call.

    Attributes:
        began_s: When it began.
        ended_s: When it had ended.
        thread: The thread.
        category: ``FETCH``, ``BACKWARD`` or ``STEP``.
        name: A short name.
        context_id: Its autograd context, or 0.
        details: What else is known, as pairs of names and plain values.
    """

    began_s: float
    ended_s: float
    thread: int
    category: str
    name: str
    context_id: int
    details: tuple[tuple[str, Any], ...]


FETCH, BACKWARD, STEP = "fetch", "backward", "optimizer"
"""Categories of ``Ran``: tensors are fetched, a part of a pass runs, an optimizer steps."""


class Profiled(NamedTuple):
    """An event of ``torch.profiler``.

    Attributes:
        began_s: When it began, by the clock of the other records.
        ended_s: When it ended.
        device: Its device, such as ``"cuda:0"``; empty for the CPU.
        lane: The system's id of its thread, or the stream of the device.
        name: Its name.
    """

    began_s: float
    ended_s: float
    device: str
    lane: int
    name: str


Record = Made | Created | Served | Sent | Received | Offered | Pulled | Ran

_TYPES: tuple[Any, ...] = (Made, Created, Served, Sent, Received, Offered, Pulled, Ran)


def read(rows: Iterable[Row]) -> list[Record]:
    """Returns the records in rows, by their numbers."""
    return [_TYPES[row[1]]._make(row[2:]) for row in sorted(rows, key=lambda row: int(row[0]))]


class Thread(NamedTuple):
    """A thread of a traced worker.

    Attributes:
        native_id: The system's id of it; 0 if unknown.
        name: Its name.
    """

    native_id: int
    name: str


class LinkBytes(NamedTuple):
    """What the counters of a connection have counted during a trace.

    Attributes:
        peer: The id of the worker at its other end.
        sent: Bytes sent.
        received: Bytes received.
    """

    peer: int
    sent: int
    received: int


class WorkerTrace(NamedTuple):
    """Everything that one worker has noted.

    Attributes:
        id: The id of its life in the protocols.
        name: Its name.
        rank: Its rank.
        host: The name of its host.
        pid: Its process id there.
        began_s: When it began to note.
        ended_s: When it stopped.
        peers: The names of the workers that it knows, by id.
        threads: Its threads by the number in the records.
        own_calls: Callers and numbers of the calls of the trace itself.
        links: The counters of its connections.
        dropped: How many records had no room; the oldest ones were dropped.
        records: The records.
        profiled: The events of ``torch.profiler``.
        profiled_dropped: How many of them had no room.
    """

    id: int
    name: str
    rank: int
    host: str
    pid: int
    began_s: float
    ended_s: float
    peers: dict[int, str]
    threads: dict[int, Thread]
    own_calls: frozenset[tuple[int, int]]
    links: tuple[LinkBytes, ...]
    dropped: int
    records: list[Record]
    profiled: list[Profiled]
    profiled_dropped: int
