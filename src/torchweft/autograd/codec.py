"""Encodes the messages of a backward pass, and the mode in which it is run.

The number of a frame is the number of its pass, and its flags hold the mode of the pass. A
message of gradients is a head, the payload of a list of gradients, and their tensors; see
``wire.messages``. Without a payload, the gradients are the tensors. All other messages are a tag
and 64-bit integers. In ``Failed`` two byte strings follow, whose lengths are among the integers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torchweft.errors import ProtocolError
from torchweft.protocol.backward import (
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
from torchweft.wire.frames import Buffer
from torchweft.wire.messages import Kind, decode_ints, encode_ints

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
    reader = _READERS.get(tag)
    is_short = len(integers) < _HEAD_INTEGERS
    if reader is None or is_short or min(integers[:_HEAD_INTEGERS]) < 0 or pass_id >> 63:
        raise ProtocolError(f"{len(data)} bytes with tag {tag} are no message of a backward pass")
    name = PassName(integers[1], pass_id, integers[2], mode_of(flags))
    return name, reader(integers[_HEAD_INTEGERS:], data)


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


def _read_discover(integers: tuple[int, ...]) -> Discover:
    message_ids, parts = _without_parts(integers)
    return Discover(tuple(message_ids), parts)


def _read_report(integers: tuple[int, ...], _: Buffer) -> Report:
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
_READERS: dict[int, Callable[[tuple[int, ...], Buffer], Message]] = {
    _DISCOVER: lambda integers, _: _read_discover(integers),
    _SETTLED: lambda integers, _: Settled(),
    _REPORT: _read_report,
    _FAILED: _read_failed,
    _ABORT: lambda integers, _: Abort(),
}
