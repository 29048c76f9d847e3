"""The messages of a backward pass as bytes. Gradients travel as parcels; all others fit here.

A message is its tag, the pass, and further 64-bit integers. ``Failed`` has two byte strings
behind them, whose lengths are among the integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.errors import ProtocolError
from weft.protocol.backward import (
    Abort,
    Discover,
    Done,
    Failed,
    Message,
    PassKey,
    Reached,
    Run,
    Started,
)
from weft.wire.frames import Buffer
from weft.wire.messages import decode_ints, encode_ints

_HEAD_INTEGERS = 3
_FAILED_HEAD_BYTES = 8 * (_HEAD_INTEGERS + 3)


def encode(message: Message) -> bytes:
    """Returns a message as bytes; the error of a ``Failed`` is bytes already."""
    tag = _TAGS[type(message)]
    if isinstance(message, Failed):
        operation = message.operation.encode()
        assert isinstance(message.error, bytes)
        sizes = (message.worker, len(operation), len(message.error))
        return encode_ints(tag, *message.key, *sizes) + operation + message.error
    return encode_ints(tag, *message.key, *_fields_of(message))


def _fields_of(message: Message) -> Sequence[int]:
    if isinstance(message, Discover):
        return (message.round, *message.message_ids)
    if isinstance(message, Reached):
        fields = [message.round]
        for worker, message_ids in message.frontier.items():
            fields += (worker, len(message_ids), *message_ids)
        return fields
    if isinstance(message, Run):
        return (int(message.fast), int(message.retain_graph))
    return message.known_workers if isinstance(message, Started) else ()


def decode(data: Buffer) -> Message:
    """Reads what ``encode`` wrote.

    Raises:
        ProtocolError: It is malformed.
    """
    tag = int.from_bytes(data[:8], "little")
    if tag == _FAILED:
        return _read_failed(data)
    integers = decode_ints(data)
    reader = _READERS.get(tag)
    if reader is None or len(integers) < _HEAD_INTEGERS:
        raise ProtocolError(f"{len(data)} bytes with tag {tag} are no message of a backward pass")
    try:
        return reader(PassKey(*integers[1:3]), integers[3:])
    except IndexError:
        raise ProtocolError(f"a message of a backward pass with tag {tag} is too short") from None


def _read_failed(data: Buffer) -> Failed:
    if len(data) < _FAILED_HEAD_BYTES:
        raise ProtocolError("the report of a failed backward pass is too short")
    _, *key, worker, operation_bytes, error_bytes = decode_ints(data[:_FAILED_HEAD_BYTES])
    texts = bytes(data[_FAILED_HEAD_BYTES:])
    if operation_bytes < 0 or len(texts) != operation_bytes + error_bytes:
        raise ProtocolError("the report of a failed backward pass does not add up to its length")
    operation = texts[:operation_bytes].decode(errors="replace")
    return Failed(PassKey(*key), worker, operation, texts[operation_bytes:])


def _read_reached(key: PassKey, fields: tuple[int, ...]) -> Reached:
    frontier: dict[int, tuple[int, ...]] = {}
    at = 1
    while at < len(fields):
        worker, count = fields[at], fields[at + 1]
        if not 0 <= count <= len(fields) - at - 2:
            raise ProtocolError("the answer to a walk does not add up to its length")
        frontier[worker] = fields[at + 2 : at + 2 + count]
        at += 2 + count
    return Reached(key, fields[0], frontier)


_Reader = Callable[[PassKey, tuple[int, ...]], Message]

_FAILED = 6
_TAGS: dict[type, int] = {
    Discover: 1,
    Reached: 2,
    Run: 3,
    Started: 4,
    Done: 5,
    Failed: _FAILED,
    Abort: 7,
}
_READERS: dict[int, _Reader] = {
    1: lambda key, fields: Discover(key, fields[0], fields[1:]),
    2: _read_reached,
    3: lambda key, fields: Run(key, bool(fields[0]), bool(fields[1])),
    4: lambda key, fields: Started(key, fields),
    5: lambda key, fields: Done(key),
    7: lambda key, fields: Abort(key),
}
