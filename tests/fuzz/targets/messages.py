"""The fixed parts of calls and replies: accepted bytes are exactly what the encoder makes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

from tests.fuzz.memory import at_end_of, exact_memory
from tests.fuzz.target import Bare, Target
from torchweft.engine.codec.tensors import encode_tensors
from torchweft.engine.codec.values import encode as encode_value
from torchweft.engine.codec.values import no_home, refusal_of, refuse_home
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import (
    NO_CONTEXTS,
    NO_CREATION,
    HandedReference,
    Kind,
    decode_call,
    decode_ints,
    decode_reply,
    decode_step,
    decode_tables,
    encode_call,
    encode_ints,
    encode_reply,
    encode_tables,
    encode_texts,
    with_names,
)
from torchweft.errors import WeftError
from torchweft.ids import ReferenceId
from torchweft.native import native

_LENGTH_LIMIT = 256


def _resolve(name: bytes) -> object:
    return _answer


def _answer_natively(data: memoryview) -> object:
    frame = Frame(Kind.REPLY, 0, 1, bytes(data), ())
    assert native is not None
    return native.decode_answer(frame, (100, _resolve, refuse_home))


def _answer(data: memoryview) -> bytes:
    """Reads the value of a reply in one step; what it reads is a usual reply for the plain twin."""
    if native is not None:
        try:
            value = _answer_natively(data)
        except Exception as error:
            raise refusal_of(error) or error from None
        if value is not NotImplemented:
            context_id, message_id, references, *_ = decode_reply(data)
            assert context_id in NO_CONTEXTS
            assert message_id == len(references) == 0
    return bytes(data)


class _Served:
    """A call that the native twin serves; the function returns its arguments."""

    def __init__(self, control: bytes, flags: int) -> None:
        assert native is not None
        self.function: bytes | None = None
        self.outcomes: list[object] = []
        server = None, _USUAL, _current, _threads, self._settle, _note_slow, *_REST
        self.is_served = native.serve_call(server, self, Frame(Kind.CALL, flags, 1, control, ()))

    def starts(self, worker: object, name: bytes, *_: object) -> bool:
        self.function = name
        return True

    def answer(self, frame: object) -> None:
        self.outcomes.append(frame)

    def _settle(self, *parts: object) -> None:
        self.outcomes.append(parts)

    def __call__(self, result: object, error: object) -> None:
        self.outcomes.append(error)

    @staticmethod
    def run(*args: object, **kwargs: object) -> object:
        return [*args, kwargs]


def _note_slow(name: bytes) -> None:
    pass


_current: ContextVar[object] = ContextVar("fuzzed")
_threads: dict[int, object] = {}
_USUAL = {b"module:name": (_Served, "run", _Served.run)}
_REST = True, 100, no_home, 100, _resolve, refuse_home


def _serve_natively(data: memoryview) -> object:
    return _Served(bytes(data[1:]), data[0]).is_served or NotImplemented


def _serve(data: memoryview) -> bytes:
    """Serves a call, whose flags are the first byte; the plain twin must find it usual as well."""
    if native is None or not data:
        return bytes(data)
    control = bytes(data[1:])
    call = _Served(control, data[0])
    if call.is_served:
        _, creation, name, _, value = decode_call(control)
        context_id, message_id, references, *_ = value
        assert (creation, name) == (NO_CREATION, call.function)
        assert context_id in NO_CONTEXTS
        assert message_id == len(references) == 0
        assert len(call.outcomes) == 1
        assert not _threads
    else:
        assert call.function is None
        assert not call.outcomes
    return bytes(data)


def _call(data: memoryview) -> bytes:
    remaining_s, creation, name, span, value = decode_call(data)
    context_id, message_id, references, start, end = value
    assert start <= end <= len(data)
    head = (remaining_s, creation, context_id, message_id, name, span, references)
    return encode_call(*head, bytes(data[start:end]), bytes(data[end:]))


def _reply(data: memoryview) -> bytes:
    *head, start, end = decode_reply(data)
    assert start <= end <= len(data)
    return encode_reply(*head, bytes(data[start:end]), bytes(data[end:]))


def _tables(data: memoryview) -> bytes:
    tables = [bytes(table) for table in decode_tables(data)]
    end = encode_tables(*tables)
    return bytes(data[: len(data) - len(end)]) + end


def _step(data: memoryview) -> bytes:
    step, arguments, texts = decode_step(data)
    # A list of texts has many forms in JSON: the message that is made again has the usual one.
    again = encode_ints(step, len(arguments), *arguments) + encode_texts(texts)
    assert decode_step(again) == (step, arguments, texts)
    return bytes(data)


_TRIPS: tuple[Callable[[memoryview], bytes], ...] = (
    _tables,
    _call,
    _reply,
    lambda data: encode_ints(*decode_ints(data)),
    _step,
    _answer,
    _serve,
)


def run(data: bytes) -> Exception | None:
    """Decodes the rest of ``data`` with the decoder that its first byte names."""
    if not data:
        return None
    trip, message = _TRIPS[data[0] % len(_TRIPS)], data[1:]
    try:
        again = trip(memoryview(message))
    except WeftError as error:
        return error
    assert again == message, "something was made up"
    return None


# The bytes of messages that only the plain twin reads go to native decoders of similar ones.
_BARE: tuple[Callable[[memoryview], object], ...] = (
    _answer_natively,
    _serve_natively,
    _answer_natively,
    _serve_natively,
    _answer_natively,
    _answer_natively,
    _serve_natively,
)


@contextlib.contextmanager
def bare() -> Iterator[Bare]:
    """Yields what gives the rest of an input to the native twin that its first byte names."""
    memory = exact_memory(_LENGTH_LIMIT)

    def decode_natively(data: bytes) -> bool:
        if len(data) < 2:
            return False
        decode = _BARE[data[0] % len(_BARE)]
        return decode(at_end_of(memory, data)[1:]) is not NotImplemented

    yield decode_natively


def _answer_of(value: object) -> bytes:
    tensors: list[torch.Tensor] = []
    payload = encode_value(value, tensors, True)
    inlined = encode_tensors(tensors)
    assert payload is not None
    assert inlined is not None
    return encode_reply(0, 0, (), payload, inlined[0])


def _call_seed(values: tuple[object, ...]) -> bytes:
    tensors: list[torch.Tensor] = []
    payload = encode_value(values, tensors, True)
    inlined = encode_tensors(tensors)
    assert payload is not None
    assert inlined is not None
    head = math.inf, NO_CREATION, 0, 0, b"module:name", b""
    return encode_call(*head, (), payload, inlined[0] if tensors else b"")


_VALUES: tuple[object, ...] = (
    3,
    b"some bytes, " * 5,
    [True, "text", (2.5, None), {"key": [1 << 70, 1j]}],
    ("text", {1: [2.5, None]}, torch.ones(2), torch.ones(3, 2).t()),
    [torch.ones(2, 2, dtype=torch.float64), torch.arange(3), torch.empty(0, 3)],
)


def seeds() -> list[bytes]:
    """Returns two messages for every decoder, and more for those that C has, too."""
    handed = HandedReference(ReferenceId(1, 2, 3), 4)
    call = encode_call(1.5, 2, 3, 4, b"module:name", b"", (handed, handed), b"payload")
    by_value = encode_call(1.5, NO_CREATION, 3, 4, b"", b"traceparent:0", (), b"payload")
    simple = encode_call(math.inf, NO_CREATION, 0, 0, b"", b"", (), b"")
    reply = encode_reply(3, 4, (handed,), b"payload")
    return [
        b"\0" + call + encode_tables(b"table", b"channels"),
        b"\0" + encode_tables(b"", b""),
        b"\1" + call + b"tensors",
        b"\1" + by_value + b"tensors",
        b"\1" + simple,
        b"\2" + reply + b"tensors",
        b"\2" + encode_reply(0, 0, (), b""),
        b"\3" + encode_ints(1, -1, 1 << 62),
        b"\3" + encode_ints(),
        *(b"\5" + _answer_of(value) for value in _VALUES),
        b"\5" + encode_reply(0, 0, (), b"", encode_tensors([torch.ones(3)])[0]),
        *(b"\6\0" + _call_seed((1, value)) for value in _VALUES),
        b"\6\4" + _call_seed(with_names((1,), {"more": [2, 3]})),
        b"\4" + encode_ints(1, 0),
        b"\4" + encode_ints(6, 2, 2, 3) + encode_texts(["end of file", ""]),
    ]


TARGET = Target(
    "messages",
    run,
    seeds,
    length_limit=_LENGTH_LIMIT,
    bare=None if native is None else bare,
)
