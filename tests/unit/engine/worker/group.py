"""A group of real agents in one process, with real connections, threads and pulls."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator

from torchweft.engine.io.addresses import Address, listen_tcp, listen_unix
from torchweft.engine.io.secure import TlsOptions
from torchweft.engine.io.session import ResumableLink
from torchweft.engine.protocol.connecting import Patience, Terms
from torchweft.engine.protocol.registration import Registration
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import Kind, encode_call
from torchweft.engine.worker.agent import Agent, Protection
from torchweft.engine.worker.peers import Members, Peer
from torchweft.engine.worker.references import ReferenceKeeper
from torchweft.engine.worker.tensor_messages import TensorMessage, TensorMessages

TOKEN = "0123456789abcdef0123456789abcdef"
"""The run's token, which the members of a test group share."""
KEY = Protection.of_run(TOKEN).key
LIMIT_S = 20.0


class Member:
    """One worker, up to the agent layer."""

    def __init__(self, agent: Agent, listener: socket.socket, address: Address) -> None:
        self.agent = agent
        self.listener = listener
        self.address = address
        self.tensor_messages = TensorMessages(agent)
        self.references = ReferenceKeeper(agent)

    def peer(self, other: Member) -> Peer:
        return self.agent.peers[other.agent.info.id]

    def session(self, other: Member) -> ResumableLink:
        """Returns the session with another member, which must exist."""
        link = self.peer(other).link
        assert isinstance(link, ResumableLink)
        return link

    def terms(self, other: Member) -> Terms:
        """Returns the terms of the session with another member, which must exist."""
        terms = self.peer(other).connecting.session
        assert terms is not None
        return terms

    def cut(self, other: Member) -> None:
        """Shuts down the connection with another member, without telling this member's link."""
        with contextlib.suppress(OSError):
            self.session(other)._socket.shutdown(socket.SHUT_RDWR)

    def start(self) -> None:
        self.agent.when_lost = self._peer_lost
        self.agent.start()

    def _peer_lost(self, peer: Peer) -> None:
        self.tensor_messages.peer_lost(peer)
        self.agent.calls.caller_lost(peer)
        self.references.peer_lost(peer)
        self.agent.tell_watchers(peer)

    def close(self) -> None:
        self.tensor_messages.close()
        self.agent.close()


@contextlib.contextmanager
def group_of(
    size: int,
    threads: int = 2,
    over: str = "unix",
    patience: Patience | None = None,
    tokens: tuple[str, ...] = (),
    tls: TlsOptions | None = None,
) -> Iterator[list[Member]]:
    """Yields a group that the caller has to start; closes all members at the end.

    Args:
        size: Number of members.
        threads: Number of tasks that each member runs at a time.
        over: The transport: ``"unix"``, or ``"tcp"``, over which members have sessions.
        patience: See ``Agent``.
        tokens: Each member's token of the run; the same for all by default.
        tls: How TCP connections are secured; None for no TLS.
    """
    listeners = [
        listen_tcp("127.0.0.1", is_secure=tls is not None) if over == "tcp" else listen_unix()
        for _ in range(size)
    ]
    registrations = [
        Registration(f"worker{rank}", rank, (str(address),), main="tests")
        for rank, (_, address) in enumerate(listeners)
    ]
    members = []
    for rank, (listener, address) in enumerate(listeners):
        others = [each for each in registrations if each.id != rank]
        known = Members(registrations[rank], others, is_open=False)
        protection = Protection.of_run(tokens[rank] if tokens else TOKEN, tls=tls)
        agent = Agent(protection, known, [listener], threads, math.inf, patience)
        members.append(Member(agent, listener, address))
    try:
        yield members
    finally:
        for member in members:
            member.close()


FRONT = encode_call(1.0, 2, 3, 4, b"name", b"", (), b"payload")
"""A call without its tensors, which the members of a test group send."""


class Received:
    """The calls that arrive at one member, whose tensors are fetched there in a task.

    Args:
        member: The member.
        fetches: Whether tensors are fetched; otherwise their sender may release them.
    """

    def __init__(self, member: Member, fetches: bool = True) -> None:
        self._member = member
        self._fetches = fetches
        self._came = threading.Semaphore(0)
        self.begun = threading.Event()
        self.message: TensorMessage | None = None
        self.error: Exception | None = None
        member.agent.receiver.on(Kind.CALL, self._on_call, inline=False)

    def _on_call(self, peer: Peer, frame: Frame) -> None:
        self.begun.set()
        messages = self._member.tensor_messages
        try:
            assert bytes(frame.control[: len(FRONT)]) == FRONT
            self.message = messages.read(frame)
            (messages.fetch if self._fetches else messages.discard)(peer, self.message)
        except Exception as error:
            self.error = error
        self._came.release()

    def next(self) -> TensorMessage:
        """Waits for a message, and returns it."""
        assert self._came.acquire(timeout=LIMIT_S)
        assert self.error is None, self.error
        assert self.message is not None
        return self.message

    def failure(self) -> Exception:
        """Waits for a message that cannot be opened, and returns the error."""
        assert self._came.acquire(timeout=LIMIT_S)
        error, self.error = self.error, None
        assert error is not None
        return error


def wait_until(is_so: Callable[[], object], what: str = "it") -> None:
    """Waits until ``is_so()`` is true; fails after ``LIMIT_S``."""
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"{what} did not come to be"
        time.sleep(0.001)
