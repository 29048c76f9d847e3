"""What watchers hear: the calls, backward passes, messages and tensors of one worker.

While a message waits, as little as possible is done: its numbers and the head of its control part
are kept as they are, in a plain tuple, and ``Message.noted`` reads them later. No byte of a value
is kept: the numbers at the begin of a control part have a fixed size for each kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol

from torchweft.autograd import codec
from torchweft.engine.codec.functions import describe, own_name
from torchweft.engine.io.link import Link
from torchweft.engine.protocol.calls import ServedCall
from torchweft.engine.wire.frames import HEADER, HEADER_BYTES, Buffer, Frame
from torchweft.engine.wire.messages import (
    CALL_HEAD_BYTES,
    NO_CREATION,
    NO_GRAD,
    REPLY_HEAD_BYTES,
    TABLES,
    Kind,
    decode_call,
    sizes_of_call,
    sizes_of_reply,
)
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.tensor_messages import LocalMessage, TensorMessages
from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId

# The names of called functions

Key = int | bytes | str
"""Finds a function among those counted: its name, or the id of its code. It keeps no object of the
program alive but code, which has no captured values."""


def key_of(function: Any) -> Key:
    """Returns the key of a called function; quickly for plain functions and names."""
    kept = kept_of(function)
    return kept if isinstance(kept, (bytes, str)) else id(kept)


def kept_of(function: Any) -> object:
    """Returns what is kept of a function, so that its id is not used again."""
    kind = type(function)
    if kind is FunctionType:
        # All functions that one decorator wraps have the code of its wrapper.
        wrapped = getattr(function, "__wrapped__", None)
        return function.__code__ if wrapped is None else kept_of(wrapped)
    if kind is MethodType:
        return kept_of(function.__func__)
    if kind is BuiltinFunctionType and isinstance(function.__self__, (ModuleType, type)):
        return function
    return function if kind is bytes else name_of(function)


def name_of(function: Any) -> str:
    """Returns the name of a called function in reports."""
    if isinstance(function, bytes):
        return own_name(function.decode(errors="replace")) or "a function by value"
    if isinstance(function, tuple):  # A ``Subject``: its last part is the method.
        return f"{function[-1]} of a reference"
    return function if isinstance(function, str) else describe(function)


_MOST_KEPT_NAMES = 10_000


class Names:
    """The names of called functions; looked up once for each. Thread-safe.

    Attributes:
        by_key: The names of known functions: by the id of their code, or by the name that a
            message has.
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


# Watchers


class OutgoingCall(Protocol):
    """A call that this worker makes, as a watcher hears of it.

    Attributes:
        function: What is called; ``Watcher.names`` has its name.
        worker: The life of the worker that serves it.
        worker_name: The name of that worker.
        number: Its number, the same at its caller and callee; 0 until it is sent.
        parent: The ``IncomingCall`` that its caller serves, or None.
        started_s: When it was made, by ``time.monotonic``.
        on_done: What runs when it is done; None if a thread waits for it.
        frame: The message that answers it; None before, and if it ended without an answer.
        error: With what it ended without an answer.
        notes: What watchers keep with it, each under itself.
    """

    function: Any
    worker: int
    worker_name: str
    number: int
    parent: Any
    started_s: float
    on_done: Any
    frame: Any
    error: BaseException | None
    notes: dict[Any, Any]

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without an answer, or an error answers it."""


class IncomingCall(Protocol):
    """A call that this worker serves, as a watcher hears of it.

    Attributes:
        function: What is called, once the request is read; ``Watcher.names`` has its name.
        peer: The caller, with its ``id`` and ``name``.
        number: The number of the call at its caller; 0 if the caller does not wait for an answer.
        arrived_s: When the request came, by ``time.monotonic``.
        has_ended: Whether it was answered, or will not be answered.
        frame: The request, until it is read.
        notes: What watchers keep with it, each under itself; not set if nobody watched when its
            turn came.
    """

    function: Any
    peer: Any
    number: int
    arrived_s: float
    has_ended: bool
    frame: Any
    notes: dict[Any, Any]

    @property
    def own_context_id(self) -> int:
        """The autograd context that the request names; 0 if none, or if it is not read yet."""


class Watcher:
    """Is told of what a worker does, by any thread; see ``torchweft.extending.watch``.

    Nothing happens unless a method is overridden. The methods neither block nor raise.

    Attributes:
        hears_messages: Whether it is told of messages, and of tensors that go over other channels.
            A worker has one such watcher at most.
        carries_contexts: Whether calls run in its contexts. A worker has one such watcher at most.
    """

    hears_messages = False
    carries_contexts = False

    @cached_property
    def names(self) -> Names:
        """The names of called functions: ``names.name_of(call.function)``."""
        return Names()

    # Calls that this worker makes

    def call_begins(self, call: OutgoingCall) -> bytes:
        """Is told of a call before its request is encoded.

        Returns:
            The context of a span that the call carries; empty for none. A context of more than
            8192 bytes is not carried.
        """
        return b""

    def call_ends(self, call: OutgoingCall) -> None:
        """Is told of an outcome before those that wait for it go on."""

    def call_fails(self, call: OutgoingCall, error: BaseException) -> None:
        """Is told of a call that was not sent, or of an error that was read as its answer."""

    def creation_sent(self, call: OutgoingCall, reference: ReferenceId) -> None:
        """Is told of a call that makes a value. Nobody waits for its answer."""

    # Calls that it serves

    def serving_begins(self, call: IncomingCall) -> None:
        """Is told of a call whose turn has come, or that is refused."""

    def serving_ends(self, call: IncomingCall, error: BaseException | None) -> None:
        """Is told of the outcome of a served call before it is answered."""

    def served(self, call: IncomingCall, error: BaseException | None) -> None:
        """Is told of a served call after it was answered."""

    @staticmethod
    def request_of(
        call: IncomingCall | ServedCall,
    ) -> tuple[bytes | Callable[..., Any], bytes]:
        """Returns the function that a served call names, and the context that it carries, if any.

        The request need not be read yet.
        """
        if call.frame is None:
            return call.function, b""
        try:
            control = call.frame.control
            head = control.head if isinstance(control, LocalMessage) else decode_call(control)
            return head[2], head[3]
        except ProtocolError:
            return b"what no worker asks for", b""

    # Contexts in which calls run

    def around(self, call: IncomingCall, run: Callable[[], Any]) -> Any:
        """Runs what serves a call, or a part of that, in the context of the call."""
        return run()

    def run_batch(self, calls: Sequence[Any], function: Any, run: Callable[[], Any]) -> Any:
        """Runs the function of a batch of calls; returns its result."""
        return run()

    def context_here(self) -> object:
        """Returns the context of this thread, for a call of a batched function by it."""
        return None

    # Backward passes, whose key is the number of the pass and that of its autograd context

    def pass_runs(self, context_id: int) -> contextlib.AbstractContextManager[object]:
        """Returns a block around a pass that this worker leads."""
        return contextlib.nullcontext()

    def part_runs(
        self,
        key: tuple[int, int],
        operations: Callable[[], dict[str, int]],
        work: Callable[[], tuple[list[Any], Any]],
    ) -> tuple[list[Any], Any]:
        """Runs a step of this worker's part of a pass.

        Args:
            key: The pass.
            operations: Returns the names of the operations that run next, and how many of each;
                called before ``work``.
            work: The step. Returns the gradients to send, and the progress: ``executed`` has the
                messages whose operations have run, and ``answered`` those whose gradients are sent.

        Returns:
            What ``work`` has returned.
        """
        return work()

    def span_before(self, worker: int, key: tuple[int, int]) -> bytes:
        """Returns the context of the span of a pass, to be sent before its next message.

        Args:
            worker: The life of the worker that gets the message.
            key: The pass.

        Returns:
            The context, as for ``call_begins``; empty for none, or if the worker has it.
        """
        return b""

    def take_span(self, key: tuple[int, int], context: bytes) -> None:
        """Takes the context of the span of a pass, which another worker has sent."""

    # Messages, and tensors that go over other channels. Workers are named by their life. A note is
    # a plain tuple, which ``Message.noted`` reads.

    def sending(self, worker: int, notes: Sequence[Note]) -> Any:
        """Is told of messages before they are written; returns what ``sent`` gets."""

    def sent(self, noted: Any) -> None:
        """Is told what ``sending`` returned for messages that are written now."""

    def received(self, worker: int, note: Note) -> None:
        """Is told of a message before it is handled."""

    def offered(self, worker: int, kind: str, number: int, channels: Mapping[str, int]) -> None:
        """Is told of the tensors of a message by the bytes that go over each other channel."""

    def pulled(self, channel: str, size_bytes: int) -> None:
        """Is told of tensors that this thread has fetched over a channel."""

    def fetched(self, worker: str, began_s: float) -> None:
        """Is told that the tensors of a message have come, or could not be fetched."""


# Messages

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

Note = tuple[Any, ...]
"""What is kept of a message: its size, its kind, its flags, its number, the sizes of its control
part and of what is behind that, and the head of its control part."""


class Message(NamedTuple):
    """A message of which a watcher was told.

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

    @classmethod
    def noted(cls, note: Sequence[Any]) -> Message:
        """Returns the message that a note is of."""
        size_bytes, kind, flags, number, control_bytes, behind_bytes, head = note
        found = cls(kind_name(kind), size_bytes, number, stream_bytes=behind_bytes)
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


def kind_name(kind: int) -> str:
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

    def __init__(self, watcher: Watcher, worker: int) -> None:
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


def _notes_in(parts: Sequence[Buffer]) -> list[Note]:
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


def tell_messages(agent: Agent, tensors: TensorMessages, watcher: Watcher) -> Callable[[], None]:
    """Has a watcher hear of messages, and of tensors on other channels; returns what ends that."""
    taps: dict[Link, _Tap] = {}

    def tap(link: Link, peer: Peer) -> None:
        if link.watcher is None:
            agent.receiver.watched.add(link)
            link.watcher = taps[link] = _Tap(watcher, peer.id)

    tensors.on_fetched = lambda peer, began_s: watcher.fetched(peer.name, began_s)
    tensors.on_offered = lambda peer, kind, number, moved: watcher.offered(
        peer.id, kind_name(kind), number, moved
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

    return end
