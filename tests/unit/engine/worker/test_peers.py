from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.thorough import examples
from tests.unit.engine.channels.home import make_home
from tests.unit.engine.io.reading import not_main, reading, received  # noqa: F401
from torchweft import knobs
from torchweft.engine.channels.channels import Channels
from torchweft.engine.io.addresses import dial, listen_unix
from torchweft.engine.io.handshake import Greeting, Handshake
from torchweft.engine.io.link import Link
from torchweft.engine.io.ring import Ring
from torchweft.engine.io.session import ResumableLink
from torchweft.engine.protocol.connecting import (
    HandshakeTimeout,
    Patience,
    State,
    Terms,
    Unreachable,
)
from torchweft.engine.protocol.registration import Registration
from torchweft.engine.wire.frames import FrameParser, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.connecting import Acceptor, Connector
from torchweft.engine.worker.peers import Peer
from torchweft.errors import ProtocolError, WorkerLost
from torchweft.secret import Secret, key_of_observers

pytestmark = pytest.mark.usefixtures("not_main")

KEY = Secret(b"the key of this run")
OTHER_KEY = Secret(b"the key of another run")
LIMIT_S = 20.0


class Side:
    """One worker: its connector, its acceptor and its links."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.listener, self.address = listen_unix()
        self.links: list[Link] = []
        self.peers: list[Peer] = []
        me = Registration(f"worker{rank}", rank, (str(self.address),), facts={"host": "here"})
        with knobs.CONNECT_TIMEOUT_S.override(timeout_s):
            self.channels = Channels(make_home())
            self.connector = Connector(
                me,
                False,
                KEY,
                self.channels,
                self,  # type: ignore[arg-type]
                None,
                has_secret=False,
            )
        self.acceptor = Acceptor(
            self.connector,
            self._lookup,
            lambda connection: None,
            lambda peer: None,
            key_of_observers(None),
        )
        self.refusals = 0

    def know(self, sides: list[Side]) -> None:
        self.peers = [
            Peer(
                Registration(f"worker{side.rank}", side.rank, (str(side.address),)),
                main_by_name=True,
                is_self=side is self,
            )
            for side in sides
        ]

    def make_link(
        self, connection: socket.socket, peer: Peer, terms: Terms | None, ring: Ring | None
    ) -> Link:
        assert terms is None, "over a Unix socket there is no session"
        parser = FrameParser(lambda size: memoryview(bytearray(size)), 4096, 1 << 20, 1 << 20)
        return Link(connection, parser, lambda link: None, ring)

    def adopt(self, peer: Peer, link: Link, terms: Terms | None) -> None:
        self.links.append(link)
        assert not peer.adopt(link, terms, Patience(LIMIT_S, LIMIT_S))

    def resume(
        self, peer: Peer, link: ResumableLink, connection: socket.socket, position: int
    ) -> None:
        raise AssertionError("over a Unix socket there is no session")

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        self.acceptor.greet(connection)
        self.refusals += connection.fileno() < 0

    def _lookup(self, worker: int, registration: Registration | None) -> Peer | None:
        is_other = worker != self.rank and 0 <= worker < len(self.peers)
        return self.peers[worker] if is_other else None

    def close(self) -> None:
        self.listener.close()
        self.acceptor.close()
        self.connector.close()
        self.channels.close(0.0)
        for link in self.links:
            link.close()


Make = Callable[..., list[Side]]


@pytest.fixture
def make_sides() -> Iterator[Make]:
    made: list[Side] = []

    def make(timeout_s: float = LIMIT_S) -> list[Side]:
        sides = [Side(rank, timeout_s) for rank in range(2)]
        for side in sides:
            side.know(sides)
        made.extend(sides)
        return sides

    yield make
    for side in made:
        side.close()


@contextlib.contextmanager
def running(*targets: Callable[[], object]) -> Iterator[None]:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def exchange(sides: list[Side]) -> None:
    """Sends a frame each way over the links that the peers have."""
    for source, target in ((0, 1), (1, 0)):
        sending, receiving = sides[source].peers[target].link, sides[target].peers[source].link
        assert sending is not None
        assert receiving is not None
        sending.send(encode_frame(1, 0, source + 7, b"hello"), may_block=False)
        frames = []
        with reading(receiving):
            while not frames or frames[-1].id != source + 7:
                frames += received(receiving, may_block=True)


def test_crossed_dialling_always_ends_with_one_connection(make_sides: Make) -> None:
    crossings = 0
    for number in range(60):
        if crossings and number >= examples(60):
            break
        sides = make_sides()
        start = threading.Barrier(2)
        links: list[Link] = []

        def dial_other(
            side: Side, start: threading.Barrier = start, links: list[Link] = links
        ) -> None:
            start.wait()
            links.append(side.connector.connect(side.peers[1 - side.rank], math.inf))

        acceptors = [threading.Thread(target=accept_all, args=(side,)) for side in sides]
        for thread in acceptors:
            thread.start()
        with running(*[lambda side=side: dial_other(side) for side in sides]):  # type: ignore[misc]
            pass
        assert [len(side.links) for side in sides] == [1, 1]
        assert {sides[0].links[0], sides[1].links[0]} == set(links)
        exchange(sides)
        crossings += sum(side.refusals for side in sides)
        for side, thread in zip(sides, acceptors, strict=True):
            side.listener.shutdown(socket.SHUT_RDWR)
            thread.join(LIMIT_S)
            side.close()
    assert crossings, "they have always missed each other: nothing was tried"


def accept_all(side: Side) -> None:
    with contextlib.suppress(OSError):
        while True:
            side.accept()


def test_a_peer_that_listens_and_does_not_speak_is_waited_for_and_not_lost(
    make_sides: Make,
) -> None:
    """The peer's kernel accepts the connection; the peer is busy, or stopped."""
    sides = make_sides(0.02)
    began_s = time.monotonic()
    # On a busy machine, no time may be left for the first attempt.
    with pytest.raises((HandshakeTimeout, Unreachable), match=r"too long|timed out|no time left"):
        sides[0].connector.connect(sides[0].peers[1], began_s + 0.3)
    assert time.monotonic() - began_s < 0.3 + LIMIT_S / 2
    assert sides[0].peers[1].lost is None
    assert sides[0].peers[1].connecting.state is State.IDLE


def test_a_lost_peer_is_not_dialled_and_not_accepted(make_sides: Make) -> None:
    sides = make_sides()
    peer = sides[0].peers[1]
    assert peer.declare_lost("a test") is not None
    assert peer.declare_lost("again") is None
    with pytest.raises(WorkerLost, match=r"worker1.*a test") as caught:
        sides[0].connector.connect(peer, math.inf)
    assert caught.value.worker == "worker1"
    assert caught.value.cause == "a test"
    assert caught.value is not peer.lost
    with running(sides[0].accept), pytest.raises(Unreachable, match="turned away: this group lost"):
        sides[1].connector.connect(sides[1].peers[0], math.inf)
    assert sides[0].links == sides[1].links == []


def hello(worker: int, **facts: object) -> Greeting:
    return Greeting(worker, facts={"capabilities": None, "verdict": None, **facts})


@pytest.mark.parametrize(
    "said",
    [hello(2), hello(-1), hello(0), hello(1, session="x", attempt=1), hello(1, registration=[])],
    ids=["no rank", "negative rank", "itself", "a session", "no registration"],
)
def test_a_member_that_makes_no_sense_is_hung_up_on(make_sides: Make, said: Greeting) -> None:
    side = make_sides()[0]
    with dial(side.address, LIMIT_S) as member:
        with running(side.accept):
            handshake = Handshake.dial(member, KEY, time.monotonic() + LIMIT_S)
            handshake.send(Kind.HELLO, said)
        with pytest.raises(ConnectionError):
            handshake.receive(Kind.WELCOME)
    assert side.links == []
    assert side.peers[1].connecting.state is State.IDLE


def test_a_peer_of_another_run_is_no_peer(make_sides: Make) -> None:
    """A stranger has taken over the address and answers with a key of its own."""
    sides = make_sides()

    def answer() -> None:
        connection, _ = sides[1].listener.accept()
        with connection:
            handshake = Handshake.accept(connection, OTHER_KEY, time.monotonic() + LIMIT_S)
            with pytest.raises(ProtocolError):
                handshake.receive(Kind.HELLO)
            handshake.send(Kind.WELCOME, hello(1))

    with running(answer), pytest.raises(Unreachable, match="another run"):
        sides[0].connector.connect(sides[0].peers[1], math.inf)
    assert sides[0].links == []
