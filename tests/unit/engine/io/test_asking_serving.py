"""Whole calls in one step of the native twin: sent and answered, read and served."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from tests.unit.engine.io.test_lease import End, lease_of
from torchweft.engine.codec.tensors import encode_tensors
from torchweft.engine.codec.values import encode, no_home, refuse_home
from torchweft.engine.wire.frames import Frame, encode_frame
from torchweft.engine.wire.messages import (
    NO_CREATION,
    Kind,
    decode_reply,
    encode_call,
    encode_reply,
)
from torchweft.native import native, reason

pytestmark = pytest.mark.skipif(native is None, reason=reason)
LIMIT_S = 20.0
REST = 9, lambda name: name, refuse_home
NAME = b"module:function"


@pytest.fixture
def end() -> Iterator[End]:
    made = End().watch()
    yield made
    made.close()


def encoded(value: object) -> tuple[bytes, bytes]:
    """Returns the payload of a value, and its tensors."""
    tensors: list[torch.Tensor] = []
    payload, inlined = encode(value, tensors, True), encode_tensors(tensors)
    assert payload is not None
    assert inlined is not None
    return payload, inlined[0] if tensors else b""


# Asking


class Call:
    frame: Frame | None = None


def ask(end: End, calls: dict[int, Call], rest: tuple[Any, ...] = REST) -> Any:
    assert native is not None
    message = encode_frame(Kind.CALL, 0, 7, b"request")
    return native.Lease.ask(end.link, 7, calls[7], message, calls, rest)


def test_an_answer_that_comes_at_once_is_decoded_and_ends_the_call(end: End) -> None:
    payload, tensors = encoded([1, torch.ones(2)])
    end.arrives(Kind.REPLY, 7, encode_reply(0, 0, (), payload, tensors))
    calls = {7: Call()}
    ((number, tensor),) = ask(end, calls)
    assert number == 1
    assert torch.equal(tensor, torch.ones(2))
    assert not calls
    assert not end.is_read
    assert end.is_armed


@pytest.mark.parametrize(
    ("control", "rest"),
    [
        (encode_reply(5, 0, (), encoded(3)[0]), REST),
        (encode_reply(0, 0, (), b"\xff malformed"), REST),
        (encode_reply(0, 0, (), encoded(3)[0]), ()),
        (b"short", REST),
    ],
    ids=["context", "malformed", "undecoded", "short"],
)
def test_an_unusual_answer_is_left_to_the_plain_twin(
    end: End, control: bytes, rest: tuple[Any, ...]
) -> None:
    end.arrives(Kind.REPLY, 7, control)
    calls = {7: (call := Call())}
    assert ask(end, calls, rest) is None
    assert call.frame is not None
    assert call.frame.control == control
    assert not calls


def test_an_error_of_python_code_that_decodes_is_returned(end: End) -> None:
    """A signal handler may have raised it."""
    error = RuntimeError("the handler")

    def resolve(name: bytes) -> object:
        raise error

    end.arrives(Kind.REPLY, 7, encode_reply(0, 0, (), encoded(len)[0]))
    calls = {7: (call := Call())}
    assert ask(end, calls, (9, resolve, refuse_home)) is error
    assert call.frame is not None
    assert not calls
    assert not end.is_read


def test_a_call_without_an_answer_yet_leaves_a_lease(end: End) -> None:
    calls = {7: (call := Call())}
    lease = ask(end, calls)
    assert end.other.recv(1000) == b"".join(encode_frame(Kind.CALL, 0, 7, b"request"))
    assert calls
    assert end.is_read
    end.arrives(Kind.REPLY, 7, b"late")
    assert lease.wait(1 << Kind.REPLY, 7, call, None, -1, 0.0, -1) == 1
    lease.release()
    assert not end.is_read


def test_nothing_is_sent_where_another_thread_reads(end: End) -> None:
    with_lease: list[Any] = []
    other = threading.Thread(target=lambda: with_lease.append(lease_of(end)))
    other.start()
    other.join(LIMIT_S)
    calls = {7: Call()}
    assert ask(end, calls) is False
    assert calls
    end.other.setblocking(False)
    with pytest.raises(BlockingIOError):
        end.other.recv(1)


def test_a_call_over_a_broken_connection_raises_and_leaves_no_lease(end: End) -> None:
    end.other.close()
    with pytest.raises(OSError, match="Broken pipe"):
        ask(end, {7: Call()})
    assert not end.is_read


# Serving


class Served:
    """A call as ``rpc.serving`` makes it."""

    def __init__(self, peer: object, frame: Frame, arrived_s: float) -> None:
        self.number = frame.id
        self.was_arrived_s = arrived_s
        self.outcomes: list[Any] = []
        made.append(self)

    def starts(self, *head: Any) -> bool:
        self.head = head
        return self.number != UNWANTED

    def answer(self, frame: bytearray) -> None:
        self.outcomes.append(bytes(frame))

    def __call__(self, result: object, error: BaseException) -> None:
        self.outcomes.append(error)


UNWANTED = 13
made: list[Served] = []
current: ContextVar[object] = ContextVar("current", default=None)


class Module:
    """Where the called function stands."""

    function: Any


class Server:
    """What serving takes, and what it has left."""

    def __init__(self, end: End, function: Callable[..., Any]) -> None:
        made.clear()
        self.end = end
        self.settled: list[Any] = []
        self.slow: list[bytes] = []
        self.threads: dict[int, object] = {}
        self.unarmed: dict[int, float] = {}
        self.ready: deque[Any] = deque()
        self.handling = threading.Lock()
        self.modes_ended = 0
        Module.function = function
        self.usual = {NAME: (Module, "function", function)}
        self.fd = end.ours.fileno()

    def serve(self, spins: bool = False) -> Any:
        def leave(fd: int) -> None:
            self.unarmed[fd] = 1.0

        def settle(function: object, result: object, call: Served) -> None:
            self.settled.append(result)

        def end_modes() -> None:
            self.modes_ended += 1

        head = None, self.usual, current, self.threads, settle, self.slow.append
        peer_parts = (*head, True, 9, no_home, *REST)
        arms = self.handling, self.unarmed, leave
        before = self.end.incoming, self.ready, deque(), set(), {}
        parts = peer_parts, "peer", self.fd, *arms, Served, end_modes, *before
        assert self.end.link.claim()
        return self.end.link.read(spins, parts)


def arrives(
    end: End, *values: Any, number: int = 7, flags: int = 0, name: bytes = NAME, context: int = 0
) -> None:
    payload, tensors = encoded(values)
    control = encode_call(math.inf, NO_CREATION, context, 0, name, b"", (), payload, tensors)
    end.other.sendall(encode_frame(Kind.CALL, flags, number, control)[0])


def result_in(answer: bytes) -> Any:
    from torchweft.engine.codec.values import decode

    *_, start, stop = decode_reply(answer[16:])
    return decode(answer[16 + start : 16 + stop], (), ())


def test_a_call_that_comes_alone_is_served_and_the_link_claimed_again(end: End) -> None:
    seen: list[Any] = []

    def function(*args: Any) -> list[Any]:
        seen.append((current.get(), *server.threads.values(), end.is_read))
        return [*args, "done"]

    server = Server(end, function)
    arrives(end, 1, "two")
    assert server.serve() == 0
    (call,) = made
    assert result_in(call.outcomes[0]) == [1, "two", "done"]
    assert seen == [(call, call, False)]
    assert call.head[:3] == (None, NAME, 0)
    assert end.is_read
    assert current.get() is None
    assert server.modes_ended == 1
    assert server.threads == server.unarmed == {}


def test_calls_that_come_one_by_one_are_served_in_one_go(end: End) -> None:
    def function(number: int) -> int:
        if number:
            arrives(end, number - 1)
        return number

    server = Server(end, function)
    arrives(end, 30)
    assert server.serve() == 0
    assert [result_in(call.outcomes[0]) for call in made] == [*range(30, -1, -1)]
    # The machine may have held up some of them.
    assert len(server.slow) < 31


@pytest.mark.parametrize("why", ["name", "redefined", "context", "flags", "arguments", "malformed"])
def test_an_unusual_call_is_left_unread(end: End, why: str) -> None:
    server = Server(end, pytest.fail)
    if why == "redefined":
        Module.function = print
    if why in ("arguments", "malformed"):
        payload = encoded("no tuple")[0] if why == "arguments" else b"\xff malformed"
        control = encode_call(math.inf, NO_CREATION, 0, 0, NAME, b"", (), payload)
        end.arrives(Kind.CALL, 7, control)
    else:
        name = b"other:function" if why == "name" else NAME
        arrives(end, name=name, context=5 if why == "context" else 0, flags=why == "flags")
    assert server.serve() == 1
    (frame,) = end.incoming
    assert (frame.kind, frame.id) == (Kind.CALL, 7)
    assert not made
    assert not server.unarmed
    assert end.is_read


@pytest.mark.parametrize("why", ["two", "other kind", "task", "handling", "incoming"])
def test_a_call_that_does_not_come_alone_is_queued(end: End, why: str) -> None:
    server = Server(end, pytest.fail)
    if why == "other kind":
        end.arrives(Kind.REPLY, 3)
    if why == "task":
        server.ready.append(1)
    if why == "handling":
        server.handling.acquire()
    if why == "incoming":
        end.incoming.append(Frame(Kind.REPLY, 0, 3, b"", ()))
    arrives(end, number=7)
    if why == "two":
        arrives(end, number=8)
    count = server.serve()
    assert count == (2 if why in ("two", "other kind") else 1)
    assert [frame.id for frame in end.incoming][-1] == (8 if why == "two" else 7)
    assert not made
    assert end.is_read


def test_a_link_that_another_thread_took_meanwhile_is_left_to_it(end: End) -> None:
    def function() -> None:
        server.unarmed.clear()  # As the function took long, another thread has armed it.

    server = Server(end, function)
    arrives(end)
    assert server.serve() is False
    assert made[0].outcomes
    assert not end.is_read


def test_a_link_that_a_waiting_thread_reads_is_armed(end: End) -> None:
    leases: list[Any] = []

    def function() -> None:
        other = threading.Thread(target=lambda: leases.append(lease_of(end)))
        other.start()
        other.join(LIMIT_S)

    server = Server(end, function)
    arrives(end)
    assert server.serve() is False
    assert not server.unarmed
    leases[0].release()
    assert end.is_armed
