"""What a worker notes while it is traced: calls, messages, tensors, and parts of backward passes.

While a call waits, as little as possible is done: numbers, times and the head of a message are kept
as they are, in one plain tuple. ``slices`` reads them when the trace has ended. No byte of a value
is kept: the numbers at the begin of a control part have a fixed size for each kind of message.
"""

from __future__ import annotations

import itertools
import time
from _thread import get_ident
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.autograd.graph import Node

from torchweft.autograd import codec
from torchweft.autograd.contexts import PLACEHOLDER
from torchweft.autograd.graph import Reached
from torchweft.autograd.local_pass import LocalPass, Outgoing
from torchweft.engine.protocol.backward import Progress
from torchweft.engine.protocol.calls import AnsweredCall
from torchweft.engine.wire.frames import HEADER, HEADER_BYTES, Buffer, Frame
from torchweft.engine.wire.messages import (
    CALL_HEAD_BYTES,
    ERROR_REPLY,
    NO_CREATION,
    NO_GRAD,
    REPLY_HEAD_BYTES,
    TABLES,
    Kind,
    sizes_of_call,
    sizes_of_reply,
)
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.peers import Peer
from torchweft.free_threading import shared_count
from torchweft.ids import ReferenceId
from torchweft.observe.counting import kept_of, key_of, name_of
from torchweft.observe.tracing.reading import BACKWARD, FETCH
from torchweft.rpc.worker import Watcher

_CALL, _REPLY, _POST = int(Kind.CALL), int(Kind.REPLY), int(Kind.POST)
_GRADIENTS = int(Kind.GRADIENTS)

LENGTHS: dict[int, int] = {
    _CALL: CALL_HEAD_BYTES,
    _POST: CALL_HEAD_BYTES,
    _REPLY: REPLY_HEAD_BYTES,
    _GRADIENTS: codec.HEAD_BYTES,
    int(Kind.BACKWARD): codec.HEAD_BYTES,
}
"""Bytes to keep of the control part, by the kind of message."""


def head_in(kind: int, control: Buffer) -> bytes:
    """Returns what is kept of a control part."""
    return bytes(control[: LENGTHS.get(kind, 0)])


class Ids(NamedTuple):
    """The numbers of a message.

    Attributes:
        context_id: Its autograd context, or 0.
        message_id: Its recorded message, or that which its gradients belong to; or 0.
        creation: The number of the reference that it creates, or ``NO_CREATION``.
        inline_bytes: Bytes of tensors inside of its control part, with their description.
    """

    context_id: int = 0
    message_id: int = 0
    creation: int = NO_CREATION
    inline_bytes: int = 0


def ids_in(kind: int, flags: int, head: bytes, control_bytes: int) -> Ids:
    """Returns the numbers in what was kept of a message.

    Args:
        kind: Its kind.
        flags: Its flags.
        head: The return value of ``head_in``.
        control_bytes: Size of its control part.
    """
    if kind == _GRADIENTS and len(head) == codec.HEAD_BYTES:
        context_id, message_id, _, before = codec.ids_in(head)
        inline_bytes = 0 if flags & TABLES else max(control_bytes - before, 0)
        return Ids(context_id, message_id, NO_CREATION, inline_bytes)
    if kind == Kind.BACKWARD and len(head) == codec.HEAD_BYTES:
        return Ids(codec.ids_in(head)[0])
    if kind in (_CALL, _POST) and len(head) == CALL_HEAD_BYTES:
        found = sizes_of_call(head)
    elif kind == _REPLY and len(head) == REPLY_HEAD_BYTES:
        found = sizes_of_reply(head)
    else:
        return Ids()
    before = found.before_tensors
    inline_bytes = 0 if flags & TABLES else max(control_bytes - before, 0)
    context_id = context_of(found.context_id)
    return Ids(context_id, found.message_id, found.creation, inline_bytes)


def context_of(context_id: int) -> int:
    """Returns the context that a message names, or 0 where it has none."""
    return 0 if context_id == NO_GRAD else context_id


Row = tuple[Any, ...]
"""A number, a tag, and fields: as ``note`` is called below, and as ``slices`` unpacks them."""

MADE, CREATED, SERVED, SENT, RECEIVED, OFFERED, PULLED, RAN = range(8)
"""The tags of the rows."""


class Rows:
    """The newest rows of one recording. Thread-safe: a row is appended in one step of C.

    Args:
        limit: How many are kept.
    """

    def __init__(self, limit: int) -> None:
        self._rows: deque[Row] = deque(maxlen=limit)
        self._ends: deque[tuple[int, float]] = deque(maxlen=limit)
        self._numbers = shared_count()

    def __len__(self) -> int:
        return len(self._rows)

    def note(self, tag: int, *fields: Any) -> int:
        """Takes a new row: its tag and fields; returns its number."""
        number = next(self._numbers)
        self._rows.append((number, tag, *fields))
        return number

    def note_end(self, number: int, at_s: float) -> None:
        """Takes the time at which the message or the answer of a row was written."""
        self._ends.append((number, at_s))

    def end(self) -> tuple[list[Row], dict[int, float], int]:
        """Is called once, when no new row is noted.

        Returns:
            The rows, the times of ``note_end`` by row, and how many rows were dropped.
        """
        rows = list(self._rows.copy())  # A thread may still note the end of its last message.
        return rows, dict(self._ends.copy()), next(self._numbers) - len(rows)


_clock: Callable[[], float] = time.monotonic


class LinkNotes:
    """Notes the messages of one link.

    A row is noted before its message is written: when the answer to a message has come, the row
    exists. The time at which the write had ended is noted afterwards.

    Args:
        rows: Takes the rows.
        peer: The id of the worker at the other end.
    """

    def __init__(self, rows: Rows, peer: int) -> None:
        self._rows = rows
        self._peer = peer

    def sending(self, parts: Sequence[Buffer]) -> Sequence[int]:
        """Notes messages that are about to be written; returns their rows."""
        return note_parts(self._rows, list(parts), self._peer)

    def sent(self, noted: Sequence[int]) -> None:
        """Notes that they are written."""
        now_s = _clock()
        for row in noted:
            self._rows.note_end(row, now_s)

    def received(self, frame: Frame) -> None:
        """Notes a frame that was received."""
        kind, flags, identity, control, buffers = frame
        size = HEADER_BYTES + len(control) + sum([8 + len(each) for each in buffers])
        where = _clock(), get_ident(), self._peer
        head = head_in(kind, control)
        self._rows.note(RECEIVED, *where, size, kind, flags, identity, head)


def note_parts(rows: Rows, parts: list[Buffer], peer: int) -> list[int]:
    """Notes the frames in parts, each of which begins with a part; returns the rows' numbers."""
    numbers = []
    now_s, thread, place = _clock(), get_ident(), 0
    while place < len(parts):
        part = memoryview(parts[place])
        kind, _, count, control, _ = HEADER.unpack_from(part)
        begin = HEADER_BYTES + 8 * count
        least = begin + control
        size = len(part)
        place += 1
        if count and size == least:  # Otherwise its only buffer is in the same part.
            size += sum([len(each) for each in parts[place : place + count]])
            place += count
        head = bytes(part[:HEADER_BYTES]) + head_in(kind, part[begin:least])
        numbers.append(rows.note(SENT, now_s, thread, peer, size, head))
    return numbers


_MOST_NODES = 2000
"""Nodes of a part of a pass that are looked at for their names."""
_MOST_NAMES = 40


def operations_due(local: LocalPass) -> dict[str, int]:
    """Returns the names of the operations that a part of a pass runs next, and their numbers."""
    touched = [component.reached for component in local._touched.values()]
    due = [reached for _, reached, gradients, _ in local._due if gradients is not None]
    return _operations([*due, *touched])


def _operations(parts: Iterable[Reached]) -> dict[str, int]:
    """Returns the names of the operations in parts of a graph, the first to run first."""
    found: Counter[str] = Counter()
    seen: set[Node | None] = {None}
    level = [edge[0] for reached in parts for send in reached.sends for edge in send.edges]
    while level and len(seen) < _MOST_NODES:
        nodes = [node for node in dict.fromkeys(level) if node not in seen]
        seen.update(nodes)
        nodes = [node for node in nodes if node is not None and type(node) is not PLACEHOLDER]
        found.update([node.name() for node in nodes if node.next_functions])
        level = [target for node in nodes for target, _ in node.next_functions if target]
    return dict(itertools.islice(found.items(), _MOST_NAMES))


_MOST_KEPT_NAMES = 10_000


class Names:
    """The names of called functions; looked up once for each. Thread-safe.

    Attributes:
        by_key: The names of known functions.
    """

    def __init__(self) -> None:
        self.by_key: dict[Any, str] = {}
        self._kept: list[object] = []

    def name_of(self, function: Any) -> str:
        """Returns the name of a function."""
        key = key_of(function)
        name = self.by_key.get(key)
        if name is None:
            name = name_of(function)
            if len(self._kept) < _MOST_KEPT_NAMES and not isinstance(key, str):
                self._kept.append(kept_of(function))
                self.by_key[key] = name
        return name


class TracingWatcher(Watcher):
    """Notes the calls and the parts of backward passes of one worker.

    Args:
        rows: Takes the notes.
        names: The names of the called functions.
    """

    def __init__(self, rows: Rows, names: Names) -> None:
        self._rows = rows
        self._names = names

    def call_begins(self, call: PendingCall) -> bytes:
        """Keeps which thread makes a call."""
        call.notes[self] = get_ident()
        return b""

    def creation_sent(self, call: PendingCall, reference: ReferenceId) -> None:
        """Notes a call that makes a value."""
        name = self._names.name_of(call.function)
        self._rows.note(CREATED, _clock(), get_ident(), reference.owner, reference.number, name)

    def call_ends(self, call: PendingCall) -> None:
        """Notes a call at its caller."""
        function: Any = call.function
        frame, parent = call.frame, call.parent
        try:
            name = self._names.by_key[id(function.__code__)]
        except (AttributeError, KeyError):
            name = self._names.name_of(function)
        self._rows.note(
            MADE,
            call.started_s,
            _clock(),
            call.notes.get(self, 0),
            call.worker,
            call.number,
            name,
            -1 if parent is None else parent.peer.id,
            0 if parent is None else parent.number,
            call.on_done is not None,
            frame is None or frame.flags & ERROR_REPLY != 0,
        )

    def serving_begins(self, call: AnsweredCall) -> None:
        """Keeps when and where the turn of a call has come."""
        call.notes[self] = _Serving(_clock(), get_ident())

    def serving_ends(self, call: AnsweredCall, error: BaseException | None) -> None:
        """Notes a served call before its caller goes on."""
        serving = self._serving(call)
        if serving is None or call.has_ended:
            return
        function: Any = call.function
        try:
            name = self._names.by_key[function]
        except (TypeError, KeyError):
            name = self._names.name_of(function)
        made = getattr(call, "reference", None)
        serving.row = self._rows.note(
            SERVED,
            call.arrived_s,
            serving.began_s,
            _clock(),
            serving.thread,
            get_ident(),
            call.peer.id,
            call.number,
            NO_CREATION if made is None else made.number,
            name,
            call.context_id,
            error is not None,
        )

    def served(self, call: AnsweredCall, error: BaseException | None) -> None:
        """Notes when a call was answered."""
        serving = self._serving(call)
        if serving is not None and serving.row is not None:
            self._rows.note_end(serving.row, _clock())

    def _serving(self, call: AnsweredCall) -> _Serving | None:
        notes: dict[Any, _Serving] = getattr(call, "notes", {})
        return notes.get(self)

    def part_runs(
        self, local: LocalPass, work: Callable[[], tuple[list[Outgoing], Progress]]
    ) -> tuple[list[Outgoing], Progress]:
        """Notes a step of a part of a pass, with the names of its operations."""
        names = operations_due(local)
        began_s = _clock()
        outgoing, progress = work()
        if progress.executed or outgoing:
            ended_s = _clock()
            details = (
                ("operations", names),
                ("messages", tuple(progress.executed)),
                ("answered", tuple(progress.answered)),
            )
            name, context_id = next(iter(names), "leaves"), local.context_id
            self.ran(began_s, ended_s, BACKWARD, name, context_id, details)
        return outgoing, progress

    def ran(
        self,
        began_s: float,
        ended_s: float,
        category: str,
        name: str,
        context_id: int,
        details: tuple[tuple[str, Any], ...],
    ) -> None:
        """Notes work of this thread that is no call; ``details`` are pairs of plain values."""
        self._rows.note(RAN, began_s, ended_s, get_ident(), category, name, context_id, details)

    def fetched(self, peer: Peer, began_s: float) -> None:
        """Notes that tensors of a message have come, or could not be fetched."""
        self.ran(began_s, _clock(), FETCH, "tensors", 0, (("from", peer.name),))

    def offered(self, peer: Peer, kind: Kind, number: int, moved: Mapping[str, int]) -> None:
        """Notes tensors of a message that go over other channels than its connection."""
        channels = tuple([(name.removeprefix("sent "), n) for name, n in moved.items() if n])
        self._rows.note(OFFERED, peer.id, int(kind), number, channels)

    def pulled(self, peer: Peer, channel: str, size_bytes: int) -> None:
        """Notes tensors that were fetched over a channel."""
        self._rows.note(PULLED, _clock(), get_ident(), channel, size_bytes)


class _Serving:
    """What is kept of a served call until it is answered.

    Attributes:
        began_s: When its turn came.
        thread: The thread in which it began.
        row: Its row, once it has an outcome.
    """

    __slots__ = ("began_s", "row", "thread")

    def __init__(self, began_s: float, thread: int) -> None:
        self.began_s = began_s
        self.thread = thread
        self.row: int | None = None
