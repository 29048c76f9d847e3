"""Converts messages of a backward pass to frames, and frames to messages.

The number of a frame is the number of its pass, and its flags hold the mode of the pass. All
messages have one head, and behind it the numbers of messages that were walked from, executed,
answered and reached. Gradients go on with the payload of a list of gradients, and their tensors;
see ``wire.messages``. Without a payload, the gradients are the tensors. All other messages have a
tag in place of the number of a message. ``Discover`` names the messages as reached ones; the
payload of a ``Failed`` is the operation, a zero byte, and the error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torchweft.autograd.contexts import Contexts, Gradient, ReceiveRecord, SendRecord
from torchweft.autograd.outside import OutsideRecords
from torchweft.engine.codec import values
from torchweft.engine.codec.exceptions import pack_error
from torchweft.engine.codec.objects import pack, pack_plain
from torchweft.engine.codec.reading import Reader
from torchweft.engine.codec.tensors import decode_tensors, encode_tensors
from torchweft.engine.protocol.backward import (
    Abort,
    Discover,
    Failed,
    Gradients,
    Message,
    Parts,
    Progress,
    Report,
    Settled,
)
from torchweft.engine.threads.thread_modes import (
    has_dispatch_modes,
    has_function_modes,
    plain_operations,
)
from torchweft.engine.wire.frames import HEADER, Buffer, Frame
from torchweft.engine.wire.messages import TABLES, Kind, encode_ints
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.tensor_messages import TensorMessages
from torchweft.errors import ProtocolError

RETAIN_GRAPH = 1
CREATE_GRAPH = 4
FOR_INPUTS = 8
INTO_GRAD = 16
"""Flags of a frame: the mode of its pass."""
_FLAGS = (RETAIN_GRAPH, CREATE_GRAPH, FOR_INPUTS, INTO_GRAD)


class PassMode(NamedTuple):
    """How a pass is run, the same on all workers.

    Attributes:
        retain_graph: Whether graphs must survive for another pass.
        create_graph: Whether the pass itself is recorded, so that its gradients can be
            differentiated in turn.
        for_inputs: Whether only the gradients of certain tensors of the driver are wanted, and no
            gradients of leaves elsewhere.
        into_grad: Whether gradients are added to ``.grad`` of the leaves, on all workers. The
            context belongs to this pass alone and gets none.
    """

    retain_graph: bool = False
    create_graph: bool = False
    for_inputs: bool = False
    into_grad: bool = False

    @property
    def flags(self) -> int:
        """The flags of its frames."""
        return _FLAGS_OF[self]


_MODE_FLAGS = RETAIN_GRAPH | CREATE_GRAPH | FOR_INPUTS | INTO_GRAD
_MODE_OF = {
    flags: PassMode(*[bool(flags & flag) for flag in _FLAGS]) for flags in range(_MODE_FLAGS + 1)
}
_FLAGS_OF = {mode: flags & _MODE_FLAGS for flags, mode in _MODE_OF.items()}


def mode_of(flags: int) -> PassMode:
    """Returns the mode that the flags of a frame encode."""
    return _MODE_OF[flags & _MODE_FLAGS]


_HEAD = struct.Struct("<qqqqIIIII")
HEAD_BYTES = _HEAD.size
"""Bytes at the begin of a message that are numbers only, and say which it is."""
CONTEXT_BYTES = 8
"""Bytes at the begin of a message that are the number of its context."""
_GRADIENTS = int(Kind.GRADIENTS)


class PassName(NamedTuple):
    """Identifies the pass of a message.

    Attributes:
        context_id: The context.
        pass_id: Number of the pass in the group; the worker that leads it is in the high bits.
        oldest_id: Passes of the same leader in the context with lower numbers are over.
        mode: How the pass is run.
    """

    context_id: int
    pass_id: int
    oldest_id: int
    mode: PassMode


def encode(name: PassName, message: Message, recorded_id: int = 0, payload: bytes = b"") -> bytes:
    """Encodes a message; the error of a ``Failed`` must be bytes already.

    Args:
        name: The pass.
        message: The message; tensors of gradients follow the result.
        recorded_id: The number under which gradients were themselves recorded as a message of the
            context; 0 if they have no graph.
        payload: The list of gradients, if they are not just the tensors.
    """
    progress: Progress | None = None
    if isinstance(message, Gradients):
        number, progress = message.message_id, message.progress
    else:
        number = _TAGS[type(message)]
        if isinstance(message, Report):
            progress = message.progress
        elif isinstance(message, Discover):
            progress = Progress(reached=[*message.message_ids], reached_parts=message.parts)
        elif isinstance(message, Failed):
            assert isinstance(message.error, bytes)
            recorded_id = message.worker
            payload = message.operation.encode() + b"\0" + message.error
    ids = (name.context_id, name.oldest_id, number, recorded_id)
    if progress is None:
        return _HEAD.pack(*ids, 0, 0, 0, 0, len(payload)) + payload
    counts, told = _parts_of(progress)
    return _HEAD.pack(*ids, *counts, len(payload)) + encode_ints(*told) + payload


def _parts_of(progress: Progress) -> tuple[tuple[int, int, int, int], list[int]]:
    walked, executed = progress.walked, progress.executed
    answered, reached = progress.answered, progress.reached
    if progress.walked_parts:
        walked = _with_parts(walked, progress.walked_parts)
    if progress.reached_parts:
        reached = _with_parts(reached, progress.reached_parts)
    counts = (len(walked), len(executed), len(answered), len(reached))
    return counts, [*walked, *executed, *answered, *reached]


def decode(
    kind: int, pass_id: int, flags: int, data: Buffer
) -> tuple[PassName, Message, int, int, int]:
    """Decodes the result of ``encode``.

    Returns:
        The pass, the message, of gradients without these, ``recorded_id``, and the offsets of the
        payload and of the tensors.

    Raises:
        ProtocolError: It is malformed.
    """
    if len(data) < HEAD_BYTES:
        raise ProtocolError(f"a message of a backward pass has {len(data)} bytes, too few")
    context_id, oldest_id, number, recorded_id, walked, executed, answered, reached, size = (
        _HEAD.unpack_from(data)
    )
    if min(context_id, oldest_id, number, recorded_id) < 0 or pass_id >> 63:
        raise ProtocolError(f"a message of backward pass {pass_id} has numbers out of range")
    name = PassName(context_id, pass_id, oldest_id, mode_of(flags))
    count = walked + executed + answered + reached
    start = HEAD_BYTES + 8 * count
    end = start + size
    if len(data) < end or (kind != _GRADIENTS and len(data) > end):
        raise ProtocolError("a message of a backward pass does not add up to its length")
    progress = None
    if count:
        ids = struct.unpack_from(f"<{count}q", data, HEAD_BYTES)
        progress = _progress_of(walked, executed, answered, ids)
    if kind == _GRADIENTS:
        return name, Gradients(number, (), progress), recorded_id, start, end
    message = _decode_control(number, recorded_id, progress or Progress(), bytes(data[start:end]))
    return name, message, 0, start, end


def _decode_control(tag: int, worker: int, progress: Progress, payload: bytes) -> Message:
    if tag == _TAGS[Discover]:
        return Discover(tuple(progress.reached), progress.reached_parts)
    if tag == _TAGS[Report]:
        return Report(progress)
    if tag == _TAGS[Failed]:
        operation, _, error = payload.partition(b"\0")
        return Failed(worker, operation.decode(errors="replace"), error)
    if tag == _TAGS[Settled]:
        return Settled()
    if tag != _TAGS[Abort]:
        raise ProtocolError(f"a message of a backward pass has the unknown tag {tag}")
    return Abort()


_TAGS: dict[type, int] = {Discover: 1, Settled: 2, Report: 3, Failed: 4, Abort: 5}
"""Stand in place of the number of a message in those that carry no gradients."""


def _progress_of(walked: int, executed: int, answered: int, numbers: tuple[int, ...]) -> Progress:
    """Returns the progress of ``numbers``, given how many of them are of each kind."""
    ids = list(numbers)
    executed += walked
    answered += executed
    if min(ids, default=0) >= 0:
        return Progress(ids[:walked], ids[walked:executed], ids[executed:answered], ids[answered:])
    ids_walked, walked_parts = _without_parts(ids[:walked])
    ids_reached, reached_parts = _without_parts(ids[answered:])
    others = ids[walked:executed], ids[executed:answered]
    if any(number < 0 for each in others for number in each):
        raise ProtocolError("a message of a backward pass has a negative number")
    return Progress(ids_walked, *others, ids_reached, walked_parts, reached_parts)


# The tensors of a message that is not meant as a whole are negative numbers after its number: the
# bits of 56 tensors each, inverted.

_WORD_BYTES = 7
_WORD = (1 << 8 * _WORD_BYTES) - 1


def _with_parts(numbers: Iterable[int], parts: Parts) -> list[int]:
    result: list[int] = []
    rest = dict(parts)
    for number in numbers:
        result.append(number)
        bits = rest.pop(number, 0)  # A number may occur twice.
        size = -(-bits.bit_length() // (8 * _WORD_BYTES)) * _WORD_BYTES
        data = bits.to_bytes(size, "little")
        for start in range(0, size, _WORD_BYTES):
            result.append(~int.from_bytes(data[start : start + _WORD_BYTES], "little"))
    return result


def _without_parts(numbers: Iterable[int]) -> tuple[list[int], Parts]:
    ids: list[int] = []
    words_of: dict[int, list[bytes]] = {}
    words: list[bytes] | None = None
    for number in numbers:
        if number >= 0:
            # A number may occur twice, and has its tensors behind the first one.
            words = None if number in words_of else words_of.setdefault(number, [])
            ids.append(number)
        elif words is None or ~number > _WORD:
            raise ProtocolError("tensors of no message are named in a backward pass")
        else:
            words.append((~number).to_bytes(_WORD_BYTES, "little"))
    words_of = {number: words for number, words in words_of.items() if words}
    if not all(any(words[-1]) for words in words_of.values()):
        raise ProtocolError("a backward pass names a message of which it means no tensor")
    parts = {number: b"".join(words) for number, words in words_of.items()}
    return ids, {number: int.from_bytes(bits, "little") for number, bits in parts.items()}


def ids_in(head: Buffer) -> tuple[int, int, int, int]:
    """Returns the numbers in a head of gradients, which may be malformed.

    Args:
        head: Their first ``HEAD_BYTES``, or more.

    Returns:
        The context, the message, the number of its record, and where the tensors begin.

    Raises:
        ProtocolError: It is too short.
    """
    if len(head) < HEAD_BYTES:
        raise ProtocolError(f"gradients have a head of {len(head)} bytes, too few")
    context_id, _, message_id, recorded_id, *counts, size = _HEAD.unpack_from(head)
    return context_id, message_id, recorded_id, HEAD_BYTES + 8 * sum(counts) + size


# Frames

_SMALL_NUMEL = 1024


def _frame(kind: Kind, name: PassName, control: bytes) -> list[Buffer]:
    """Returns the pieces of a frame whose tensors stand in its control part."""
    # Without ``encode_frame``: each hop of a pass comes here.
    return [HEADER.pack(kind, name.mode.flags, 0, len(control), name.pass_id) + control]


class Envelopes:
    """Makes and opens the frames of backward passes, for one worker.

    In a pass that is itself recorded, gradients have a graph. They are recorded like any other
    message of the context.

    Args:
        agent: The worker's agent.
        tensor_messages: Carries gradients that are too large to stand in their message.
        contexts: The worker's contexts.
        outside: The worker's records outside of contexts.
        reader: Reads the errors of other workers.
    """

    def __init__(
        self,
        agent: Agent,
        tensor_messages: TensorMessages,
        contexts: Contexts,
        outside: OutsideRecords,
        reader: Reader,
    ) -> None:
        self._contexts = contexts
        self._outside = outside
        self._worker_name = agent.info.name
        self._tensor_messages = tensor_messages
        self._reader = reader

    def encode(self, peer: Peer, name: PassName, messages: Sequence[Message]) -> list[Buffer]:
        """Returns the bytes to write for messages to another worker."""
        if has_dispatch_modes() or has_function_modes():
            with plain_operations():
                return self.encode(peer, name, messages)
        buffers: list[Buffer] = []
        for message in messages:
            if isinstance(message, Gradients):
                buffers += self._seal_gradients(peer, name, message)
                continue
            if isinstance(message, Failed) and isinstance(message.error, BaseException):
                is_strict = peer.registration.is_strict
                message.error = pack_error(message.error, self._worker_name, is_plain=is_strict)
            buffers += _frame(Kind.BACKWARD, name, encode(name, message))
        return buffers

    def _seal_gradients(self, peer: Peer, name: PassName, message: Gradients) -> list[Buffer]:
        gradients: list[Any] = []
        is_plain = True
        for gradient in message.gradients:
            if type(gradient) is Tensor and gradient.layout is torch.strided:
                if gradient.numel() <= _SMALL_NUMEL:
                    # That of a sum is one expanded number; a contiguous one is returned itself.
                    gradient = gradient.contiguous()
                is_plain = is_plain and not vars(gradient)
            else:
                is_plain = is_plain and type(gradient) is Tensor and not vars(gradient)
            gradients.append(gradient)
        payload: bytes | None = b""
        tensors = gradients
        if not is_plain:
            tensors = []
            payload = values.encode(tuple(gradients), tensors, True)
        maps = peer.device_maps
        is_back = maps.is_any and self._is_back(name, message.message_id)
        inlined = None if payload is None else encode_tensors(tensors)
        if inlined is None:
            is_strict = peer.registration.is_strict
            packed = (pack_plain if is_strict else pack)(gradients, main_by_name=True)
            payload, tensors = packed.payload, packed.tensors
            inlined = encode_tensors(tensors)
        assert payload is not None
        recorded_id = 0
        if name.mode.create_graph:
            context = self._contexts.get_or_create(name.context_id, peer.id)
            recorded_id = context.record_send(tensors, peer.id, is_back)
        front = encode(name, message, recorded_id, payload)
        if inlined is None or (maps.is_any and tensors and maps.moves_host(is_back)):
            place = maps.back if is_back else maps.forward
            return self._tensor_messages.encode(
                peer,
                Kind.GRADIENTS,
                name.mode.flags,
                name.pass_id,
                front,
                tensors,
                None if maps.is_identity else place,
            )
        return _frame(Kind.GRADIENTS, name, front + inlined[0])

    def _is_back(self, name: PassName, message_id: int) -> bool:
        """Returns whether the gradients of a message are placed as tensors of an answer.

        They are if its tensors were not: gradients go the other way.
        """
        context = self._contexts.find(name.context_id)
        record: SendRecord | ReceiveRecord | None = self._outside.find(message_id, context)
        if record is None and context is not None:
            record = context.receive(message_id)
        return not (self._outside.is_back(message_id) if record is None else record.is_back)

    def open(self, peer: Peer, frame: Frame) -> tuple[PassName, Message]:
        """Returns the pass and message of a frame. May block to fetch large gradients.

        Raises:
            ProtocolError: It is malformed.
            WorkerLost: The sender was lost before its gradients could be fetched.
        """
        flags, control = frame.flags, frame.control
        name, message, recorded_id, start, end = decode(frame.kind, frame.id, flags, control)
        if not isinstance(message, Gradients):
            return name, message
        if flags & TABLES:
            carried = self._tensor_messages.read(frame)
            self._tensor_messages.fetch(peer, carried)
            tensors, tensor_flags = carried.tensors()
        else:
            tensors, tensor_flags = decode_tensors(control, end)
        if recorded_id and tensor_flags:
            context = self._contexts.get_or_create(name.context_id, peer.id)
            is_back = self._is_back(name, message.message_id)
            tensors = context.record_receive(
                recorded_id, peer.id, tensors, tensor_flags, is_back=is_back
            )
        message.gradients = tensors
        if start < end:
            gradients = self._reader.unpack(control[start:end], tensors, ())
            message.gradients = cast(list[Gradient], gradients)
        return name, message

    def error_of(self, content: bytes) -> BaseException:
        """Returns the error that a ``Failed`` message carries."""
        return self._reader.unpack_error(content)

    def discard(self, peer: Peer, frame: Frame) -> None:
        """Tells the sender of unneeded gradients to release them."""
        if frame.kind == Kind.GRADIENTS and frame.flags & TABLES:
            self._tensor_messages.discard(peer, self._tensor_messages.read(frame))
