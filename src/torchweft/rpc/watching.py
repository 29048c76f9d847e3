"""What observers subscribe to: the calls, passes, messages and tensors of one worker.

``Watcher`` of ``rpc.worker`` hears of calls and passes. A ``MessageWatcher`` hears of all messages
as well. While a message waits, as little as possible is done: its numbers and the head of its
control part are kept as they are, in a plain tuple, and ``message_in`` reads them later. No byte of
a value is kept: the numbers at the begin of a control part have a fixed size for each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torchweft.autograd import codec
from torchweft.engine.io.link import Link
from torchweft.engine.wire.frames import HEADER, HEADER_BYTES, Buffer, Frame
from torchweft.engine.wire.messages import (
    CALL_HEAD_BYTES,
    NO_CREATION,
    NO_GRAD,
    REPLY_HEAD_BYTES,
    TABLES,
    Kind,
    sizes_of_call,
    sizes_of_reply,
)
from torchweft.engine.worker.peers import Peer
from torchweft.rpc.worker import Watcher, Worker

_CALL, _REPLY, _POST = int(Kind.CALL), int(Kind.REPLY), int(Kind.POST)
_GRADIENTS, _BACKWARD = int(Kind.GRADIENTS), int(Kind.BACKWARD)

_LENGTHS: dict[int, int] = {
    _CALL: CALL_HEAD_BYTES,
    _POST: CALL_HEAD_BYTES,
    _REPLY: REPLY_HEAD_BYTES,
    _GRADIENTS: codec.HEAD_BYTES,
    _BACKWARD: codec.HEAD_BYTES,
}
"""Bytes to keep of the control part, by the kind of message."""

MessageNote = tuple[int, int, int, int, int, int, bytes]
"""What is kept of a message: its size, its kind, its flags, its number, the sizes of its control
part and of what is behind that, and the head of its control part."""


class MessageWatcher(Watcher):
    """A watcher that hears of messages, and of tensors that go over other channels, as well.

    A worker has one at most. Workers are named by the number of their life.
    """

    def sending(self, worker: int, notes: list[MessageNote]) -> Any:
        """Is told of messages before they are written; returns what ``sent`` gets."""

    def sent(self, noted: Any) -> None:
        """Is told what ``sending`` returned for messages that are written now."""

    def received(self, worker: int, note: MessageNote) -> None:
        """Is told of a message before it is handled."""

    def offered(self, worker: int, kind: str, number: int, channels: Mapping[str, int]) -> None:
        """Is told of the tensors of a message by the bytes that go over each other channel."""

    def pulled(self, channel: str, size_bytes: int) -> None:
        """Is told of tensors that this thread has fetched over a channel."""

    def fetched(self, worker: str, began_s: float) -> None:
        """Is told that the tensors of a message have come, or could not be fetched."""


class Message(NamedTuple):
    """A message, as its note tells it.

    Attributes:
        kind: Its kind, as ``"call"``.
        size_bytes: Its size on the connection.
        number: Its number; of a call and its answer, that of the call.
        context_id: Its autograd context, or 0.
        message_id: Its recorded message, or that which its gradients belong to; or 0.
        creation: The number of the reference that it creates, or -1.
        inline_bytes: Bytes of tensors inside of its control part, with their description.
        stream_bytes: Bytes of tensors behind its control part.
    """

    kind: str
    size_bytes: int
    number: int
    context_id: int = 0
    message_id: int = 0
    creation: int = NO_CREATION
    inline_bytes: int = 0
    stream_bytes: int = 0


def message_in(note: MessageNote) -> Message:
    """Returns the message that a note is of."""
    size_bytes, kind, flags, number, control_bytes, behind_bytes, head = note
    found = Message(name_of(kind), size_bytes, number, stream_bytes=behind_bytes)
    if len(head) < _LENGTHS.get(kind, 1):  # Of other kinds, and of what is cut short.
        return found
    if kind == _BACKWARD:
        return found._replace(context_id=codec.ids_in(head)[0])
    if kind == _GRADIENTS:
        context_id, message_id, _, before = codec.ids_in(head)
        creation = NO_CREATION
    else:
        sizes = sizes_of_reply(head) if kind == _REPLY else sizes_of_call(head)
        context_id, message_id = context_of(sizes.context_id), sizes.message_id
        creation, before = sizes.creation, sizes.before_tensors
    return found._replace(
        context_id=context_id,
        message_id=message_id,
        creation=creation,
        inline_bytes=0 if flags & TABLES else max(control_bytes - before, 0),
    )


def name_of(kind: int) -> str:
    """Returns the name of a kind of messages."""
    return Kind(kind).name.lower().replace("_", " ")


def context_of(context_id: int) -> int:
    """Returns the context that a message names, or 0 where it has none."""
    return 0 if context_id == NO_GRAD else context_id


class _Tap:
    """Tells a watcher of the messages of one link.

    Args:
        watcher: The watcher.
        worker: The worker at the other end.
    """

    def __init__(self, watcher: MessageWatcher, worker: int) -> None:
        self._watcher = watcher
        self._worker = worker
        self.sent = watcher.sent

    def sending(self, parts: Sequence[Buffer]) -> Any:
        """Tells of messages that are about to be written."""
        return self._watcher.sending(self._worker, _notes_in(parts))

    def received(self, frame: Frame) -> None:
        """Tells of a frame that was received."""
        kind, flags, number, control, buffers = frame
        behind = sum([len(each) for each in buffers])
        size = HEADER_BYTES + len(control) + 8 * len(buffers) + behind
        head = bytes(control[: _LENGTHS.get(kind, 0)])
        note = size, kind, flags, number, len(control), behind, head
        self._watcher.received(self._worker, note)


def _notes_in(parts: Sequence[Buffer]) -> list[MessageNote]:
    """Returns the notes of the frames in parts, each of which begins with a part."""
    notes = []
    place = 0
    while place < len(parts):
        part = memoryview(parts[place])
        kind, flags, count, control, number = HEADER.unpack_from(part)
        begin = HEADER_BYTES + 8 * count
        least = begin + control
        size = len(part)
        place += 1
        if count and size == least:  # Otherwise its only buffer is in the same part.
            size += sum([len(each) for each in parts[place : place + count]])
            place += count
        head = bytes(part[begin : begin + min(control, _LENGTHS.get(kind, 0))])
        notes.append((size, kind, flags, number, control, size - least, head))
    return notes


def watch(worker: Worker, watcher: Watcher) -> Callable[[], None]:
    """Has a watcher hear of what a worker does from now on; returns what ends that."""
    worker.watch(watcher)
    if not isinstance(watcher, MessageWatcher):
        return partial(worker.unwatch, watcher)
    agent, tensors = worker.agent, worker.tensor_messages
    taps: dict[Link, _Tap] = {}

    def tap(link: Link, peer: Peer) -> None:
        if link.watcher is None:
            agent.receiver.watched.add(link)
            link.watcher = taps[link] = _Tap(watcher, peer.id)

    tensors.on_fetched = lambda peer, began_s: watcher.fetched(peer.name, began_s)
    tensors.on_offered = lambda peer, kind, number, moved: watcher.offered(
        peer.id, name_of(kind), number, moved
    )
    tensors.on_pulled = lambda _, channel, size_bytes: watcher.pulled(channel, size_bytes)
    agent.links.on_made = tap
    for peer in list(agent.peers.values()):
        if peer.link is not None:
            tap(peer.link, peer)

    def end() -> None:
        agent.links.on_made = None
        for link in list(taps):
            link.watcher = None
            agent.receiver.watched.discard(link)
        tensors.on_pulled = tensors.on_offered = tensors.on_fetched = None
        worker.unwatch(watcher)

    return end
