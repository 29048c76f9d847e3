"""Places in the code where a fault can strike: named in the program, wrapped in Weft.

Only the victim wraps anything, and only the place of its fault.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from tests.faults.board import Board
from tests.faults.plan import EXIT, KILL, Fault
from torchweft.autograd.engine import Engine
from torchweft.autograd.passes import PassPart
from torchweft.engine.channels import pull
from torchweft.engine.channels.memory import BufferPool
from torchweft.engine.channels.stripes import ReceivingConnection, SendingConnection
from torchweft.engine.io.handshake import Handshake
from torchweft.engine.io.link import Link
from torchweft.engine.io.session import ResumableLink
from torchweft.engine.protocol.backward import Discover, Settled
from torchweft.engine.protocol.leaving import Send, Step
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker import rendezvous
from torchweft.engine.worker.peers import Peer
from torchweft.mapreduce import shared
from torchweft.rpc.node import Leaving, Node
from torchweft.rpc.serving import Call

EXIT_CODE = 7

_armed: dict[str, Callable[[Callable[[], object]], None]] = {}


def reach(point: str, first: Callable[[], object] = lambda: None) -> None:
    """Notes that this worker is at a point; does not return, or raises, if a fault strikes there.

    Args:
        point: Its name.
        first: Called before the fault strikes, if it does.
    """
    strike = _armed.get(point)
    if strike is not None:
        strike(first)


def arm(fault: Fault, number: int, board: Board) -> None:
    """Arms a fault of this worker, which strikes at its point."""
    lock = threading.Lock()
    count = 0

    def strike(first: Callable[[], object]) -> None:
        nonlocal count
        with lock:
            count += 1
            if count != fault.count:
                return
        first()
        board.strike(number)
        end(fault.kind)

    _armed[fault.point] = strike
    wrap = _WRAPPERS.get(fault.point)
    if wrap is not None:
        wrap()


def end(kind: str) -> None:
    """Ends this process, or its current operation."""
    if kind == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == EXIT:
        os._exit(EXIT_CODE)
    else:
        raise MemoryError("there is no memory, says the test")


def _before(owner: Any, name: str, point: str) -> Callable[[], None]:
    """Returns a function that makes every call of ``owner.name`` a point."""
    assert hasattr(owner, name), f"nothing is called {name!r} any more: {point!r} cannot be reached"

    def wrap() -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def reached(*args: Any, **options: Any) -> Any:
            reach(point)
            return function(*args, **options)

        setattr(owner, name, reached)

    return wrap


def _after(owner: Any, name: str, point: str) -> Callable[[], None]:
    assert hasattr(owner, name), f"nothing is called {name!r} any more: {point!r} cannot be reached"

    def wrap() -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def reached(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            reach(point)
            return result

        setattr(owner, name, reached)

    return wrap


def _amid_sending() -> None:
    """Strikes when the first half of the bytes to send has left."""
    for link_class in (Link, ResumableLink):
        send = link_class.send

        def send_half(link: Any, states: list[Any], *, may_block: bool, send: Any = send) -> None:
            reach("sending", functools.partial(send_half_of, link, states))
            send(link, states, may_block=may_block)

        link_class.send = send_half  # type: ignore[method-assign, assignment]


def send_half_of(link: Any, states: list[Any]) -> None:
    """Sends the first half of the bytes, and nothing after it."""
    # Held until this process ends: another thread's frame after half a frame would be nonsense.
    link.drain(1.0)
    if link.native is None:
        link._stream._writing.acquire()
    data = b"".join(bytes(state) for state in states)
    half = data[: len(data) // 2]
    with contextlib.suppress(OSError):
        if link.native is None:
            link._socket.sendall(half)
        else:
            link.native.write([half])  # Into the ring, where there is one.


def _amid_closing() -> None:
    tell = Leaving._tell

    def close(leaving: Leaving, peer: Peer, action: Send) -> None:
        if action.step is Step.CLOSE:
            reach("closing")
        tell(leaving, peer, action)

    Leaving._tell = close  # type: ignore[assignment, method-assign]


def _around_greeting(kind: Kind, *, is_sent: bool) -> Callable[[], None]:
    """Returns a function that makes a kind of greeting a point, before or after it is sent."""
    point = kind.name.lower()

    def wrap() -> None:
        send = Handshake.send

        def greet(handshake: Handshake, said: Kind, *args: Any, **options: Any) -> None:
            if said == kind and not is_sent:
                reach(point)
            send(handshake, said, *args, **options)
            if said == kind and is_sent:
                reach(point)

        Handshake.send = greet  # type: ignore[assignment, method-assign]

    return wrap


def _at_discovery() -> None:
    apply = PassPart.apply

    def discovered(state: PassPart, message: Any) -> None:
        if isinstance(message, (Discover, Settled)):
            reach("discovered")
        apply(state, message)

    PassPart.apply = discovered  # type: ignore[assignment, method-assign]


def _making_objects() -> None:
    for name in ("make", "pull"):
        _before(shared, name, "object")()


_WRAPPERS: dict[str, Callable[[], None]] = {
    "sending": _amid_sending,
    "hello": _around_greeting(Kind.HELLO, is_sent=True),
    "welcome": _around_greeting(Kind.WELCOME, is_sent=False),
    "gradients": _before(PassPart, "send_all", "gradients"),
    "discovered": _at_discovery,
    "registering": _before(rendezvous, "join", "registering"),
    "registered": _before(rendezvous, "_wait", "registered"),
    "joined": _after(Node, "start", "joined"),
    "probed": _before(Leaving, "_look", "probed"),
    "settling": _before(Leaving, "_settle", "settling"),
    "closing": _amid_closing,
    "leasing": _before(BufferPool, "lease", "leasing"),
    "pulling": _before(pull, "pull", "pulling"),
    "streaming": _before(SendingConnection, "_write", "streaming"),
    "arriving": _before(ReceivingConnection, "_read", "arriving"),
    "object": _making_objects,
    "content": _before(shared, "content", "content"),
    "filled": _before(shared.Shared, "__init__", "filled"),
    "answered": _after(Call, "__call__", "answered"),
    "context ends": _before(Engine, "_on_release", "context ends"),
}
