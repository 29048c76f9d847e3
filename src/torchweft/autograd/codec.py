"""Converts messages of a backward pass to frames, and frames to messages.

The number of a frame is the number of its pass, and its flags hold the mode of the pass. A
message of gradients is a head, the payload of a list of gradients, and their tensors; see
``wire.messages``. Without a payload, the gradients are the tensors. All other messages are a tag
and 64-bit integers. In ``Failed`` two byte strings follow, whose lengths are among the integers.
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
from torchweft.engine.wire.frames import Buffer, Frame, encode_frame
from torchweft.engine.wire.messages import TABLES, Kind, decode_ints, encode_ints
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
_HEAD_INTEGERS = 3
HEAD_BYTES = _HEAD.size
"""Bytes at the begin of gradients that say which they are; no more than that."""
NAME_BYTES = 8 * _HEAD_INTEGERS
"""Bytes at the begin of any other message that say which pass it belongs to."""
_PROGRESS_INTEGERS = 4
CONTEXT_AT = {int(Kind.GRADIENTS): 0, int(Kind.BACKWARD): 8}
"""By kind, where the number of the context stands in a message that can be decoded."""
_FAILED_HEAD_BYTES = 8 * (_HEAD_INTEGERS + 3)


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


def encode_head(
    name: PassName, message: Gradients, recorded_id: int = 0, payload_bytes: int = 0
) -> bytes:
    """Returns the head that precedes the payload.

    Args:
        name: The pass.
        message: The message.
        recorded_id: The number under which the gradients were themselves recorded as a message
            of the context; 0 if they have no graph.
        payload_bytes: Size of the payload.
    """
    ids = (name.context_id, name.oldest_id, message.message_id, recorded_id)
    if message.progress is None:
        return _HEAD.pack(*ids, 0, 0, 0, 0, payload_bytes)
    counts, told = _parts_of(message.progress)
    return _HEAD.pack(*ids, *counts, payload_bytes) + encode_ints(*told)


def _parts_of(progress: Progress) -> tuple[tuple[int, int, int, int], list[int]]:
    walked, executed = progress.walked, progress.executed
    answered, reached = progress.answered, progress.reached
    if progress.walked_parts:
        walked = _with_parts(walked, progress.walked_parts)
    if progress.reached_parts:
        reached = _with_parts(reached, progress.reached_parts)
    counts = (len(walked), len(executed), len(answered), len(reached))
    return counts, [*walked, *executed, *answered, *reached]


def decode_head(
    pass_id: int, flags: int, data: Buffer
) -> tuple[PassName, Gradients, int, int, int]:
    """Decodes the result of ``encode_head``.

    Returns:
        The pass, the message without its gradients, ``recorded_id``, and the offsets of the
        payload and of the tensors.

    Raises:
        ProtocolError: It is malformed.
    """
    if len(data) < _HEAD.size:
        raise ProtocolError(f"gradients have a head of {len(data)} bytes, too few")
    context_id, oldest_id, message_id, recorded_id, walked, executed, answered, reached, size = (
        _HEAD.unpack_from(data)
    )
    if min(context_id, oldest_id, message_id, recorded_id) < 0 or pass_id >> 63:
        raise ProtocolError(f"gradients of message {message_id} have numbers out of range")
    name = PassName(context_id, pass_id, oldest_id, mode_of(flags))
    count = walked + executed + answered + reached
    start = _HEAD.size + 8 * count
    if len(data) < start + size:
        raise ProtocolError("the head of gradients does not add up to its length")
    message = Gradients(message_id, ())
    if count:
        ids = struct.unpack_from(f"<{count}q", data, _HEAD.size)
        message.progress = _progress_of(walked, executed, answered, ids)
    return name, message, recorded_id, start, start + size


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
    for number in numbers:
        if number >= 0:
            ids.append(number)
        elif not ids or ~number > _WORD:
            raise ProtocolError("tensors of no message are named in a backward pass")
        else:
            words = words_of.setdefault(ids[-1], [])
            words.append((~number).to_bytes(_WORD_BYTES, "little"))
    parts = {number: b"".join(words) for number, words in words_of.items()}
    return ids, {number: int.from_bytes(bits, "little") for number, bits in parts.items()}


def numbers_of_gradients(data: Buffer) -> tuple[int, int, int]:
    """Returns the context and the message of gradients, and the number of their record, or 0.

    Raises:
        ProtocolError: They are malformed.
    """
    if len(data) < _HEAD.size:
        raise ProtocolError(f"gradients have a head of {len(data)} bytes, too few")
    context_id, _, message_id, recorded_id, *_ = _HEAD.unpack_from(data)
    return context_id, message_id, recorded_id


def ids_in(head: Buffer) -> tuple[int, int, int]:
    """Returns the context and the message of gradients, and where their tensors begin.

    Args:
        head: Their first ``HEAD_BYTES``.
    """
    context_id, _, message_id, _, *counts, payload_bytes = _HEAD.unpack_from(head)
    return context_id, message_id, _HEAD.size + 8 * sum(counts) + payload_bytes


def context_in(head: Buffer) -> int:
    """Returns the context of any other message, from its first ``NAME_BYTES``."""
    return decode_ints(head[:NAME_BYTES])[1]


def encode(name: PassName, message: Message) -> bytes:
    """Encodes any other message; the error of a ``Failed`` must be bytes already."""
    head = (_TAGS[type(message)], name.context_id, name.oldest_id)
    if isinstance(message, Failed):
        operation = message.operation.encode()
        assert isinstance(message.error, bytes)
        sizes = (message.worker, len(operation), len(message.error))
        return encode_ints(*head, *sizes) + operation + message.error
    if isinstance(message, Discover):
        return encode_ints(*head, *_with_parts(message.message_ids, message.parts))
    if isinstance(message, Report):
        counts, ids = _parts_of(message.progress)
        return encode_ints(*head, *counts, *ids)
    return encode_ints(*head)


def decode(pass_id: int, flags: int, data: Buffer) -> tuple[PassName, Message]:
    """Decodes the result of ``encode``.

    Raises:
        ProtocolError: It is malformed.
    """
    tag = int.from_bytes(data[:8], "little")
    words = data[:_FAILED_HEAD_BYTES] if tag == _FAILED else data
    if len(words) % 8:
        raise ProtocolError(f"a message of a backward pass has {len(words)} bytes")
    integers = struct.unpack(f"<{len(words) // 8}q", words)
    is_short = len(integers) < _HEAD_INTEGERS
    if tag not in _TAGS.values() or is_short or min(integers[:_HEAD_INTEGERS]) < 0 or pass_id >> 63:
        raise ProtocolError(f"{len(data)} bytes with tag {tag} are no message of a backward pass")
    name = PassName(integers[1], pass_id, integers[2], mode_of(flags))
    rest = integers[_HEAD_INTEGERS:]
    if tag == _REPORT:
        return name, _read_report(rest)
    if tag == _DISCOVER:
        message_ids, parts = _without_parts(rest)
        return name, Discover(tuple(message_ids), parts)
    if tag == _FAILED:
        return name, _read_failed(rest, data)
    return name, Settled() if tag == _SETTLED else Abort()


def _read_failed(integers: tuple[int, ...], data: Buffer) -> Failed:
    if len(data) < _FAILED_HEAD_BYTES:
        raise ProtocolError("the report of a failed backward pass is too short")
    worker, operation_bytes, error_bytes = integers
    texts = bytes(data[_FAILED_HEAD_BYTES:])
    is_negative = min(integers) < 0
    if is_negative or len(texts) != operation_bytes + error_bytes:
        raise ProtocolError("the report of a failed backward pass does not add up to its length")
    operation = texts[:operation_bytes].decode(errors="replace")
    return Failed(worker, operation, texts[operation_bytes:])


def _read_report(integers: tuple[int, ...]) -> Report:
    if len(integers) < _PROGRESS_INTEGERS:
        raise ProtocolError("the report of a backward pass is too short")
    counts, ids = integers[:_PROGRESS_INTEGERS], integers[_PROGRESS_INTEGERS:]
    if min(counts) < 0 or sum(counts) != len(ids):
        raise ProtocolError("the progress of a backward pass does not add up to its length")
    return Report(_progress_of(counts[0], counts[1], counts[2], ids))


_DISCOVER, _SETTLED, _REPORT, _FAILED, _ABORT = range(1, 6)
_TAGS: dict[type, int] = {
    Discover: _DISCOVER,
    Settled: _SETTLED,
    Report: _REPORT,
    Failed: _FAILED,
    Abort: _ABORT,
}


# Frames

_SMALL_NUMEL = 1024


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
            control = encode(name, message)
            buffers += encode_frame(Kind.BACKWARD, name.mode.flags, name.pass_id, control)
        return buffers

    def _seal_gradients(self, peer: Peer, name: PassName, message: Gradients) -> list[Buffer]:
        flags = name.mode.flags
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
            payload = values.encode(tuple(gradients), tensors, main_by_name=True)
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
        front = encode_head(name, message, recorded_id, len(payload)) + payload
        if inlined is None or (maps.is_any and tensors and maps.moves_host(is_back)):
            place = maps.back if is_back else maps.forward
            return self._tensor_messages.encode(
                peer,
                Kind.GRADIENTS,
                flags,
                name.pass_id,
                front,
                tensors,
                None if maps.is_identity else place,
            )
        return encode_frame(Kind.GRADIENTS, flags, name.pass_id, front + inlined[0])

    def _is_back(self, name: PassName, message_id: int) -> bool:
        """Returns whether the gradients of a message are placed as tensors of an answer.

        They are if its tensors were not: gradients go the other way.
        """
        context = self._contexts.find(name.context_id)
        record: SendRecord | ReceiveRecord | None = None
        if context is not None:
            record = context.receive(message_id) or context.send(message_id)
        record = record or self._outside.send(message_id)
        return not (self._outside.is_back(message_id) if record is None else record.is_back)

    def open(self, peer: Peer, frame: Frame) -> tuple[PassName, Message]:
        """Returns the pass and message of a frame. May block to fetch large gradients.

        Raises:
            ProtocolError: It is malformed.
            WorkerLost: The sender was lost before its gradients could be fetched.
        """
        flags, control = frame.flags, frame.control
        if frame.kind == Kind.BACKWARD:
            return decode(frame.id, flags, control)
        name, message, recorded_id, start, end = decode_head(frame.id, flags, control)
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
