from __future__ import annotations

import math
import socket
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.engine.worker.group import KEY, LIMIT_S, Member, group_of, wait_until
from tests.unit.engine.worker.sessions import Pair, pair_of
from torchweft.engine.io import addresses, handshake
from torchweft.engine.io.handshake import Greeting, Handshake
from torchweft.engine.io.link import LinkClosed
from torchweft.engine.protocol.connecting import (
    Connecting,
    Failure,
    Hello,
    Purpose,
    State,
    Step,
    Verdict,
)
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker import connecting
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.receiving import Receiver


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of() as made:
        yield made


def greet(pair: Pair, facts: dict[str, Any]) -> Greeting | None:
    return greet_at(pair.acceptor, facts)


def greet_at(member: Member, facts: dict[str, Any]) -> Greeting | None:
    """Greets a member over a new connection, as its peer would; returns the answer, if any."""
    with addresses.dial(member.address, LIMIT_S) as connection:
        handshake = Handshake.dial(connection, KEY, time.monotonic() + LIMIT_S)
        handshake.send(Kind.HELLO, Greeting(0, facts=facts))
        try:
            return handshake.receive(Kind.WELCOME)
        except ConnectionError:
            return None


def test_who_cannot_write_waits_for_the_reader_of_the_last_words() -> None:
    """A thread may read the farewell while another one finds that it cannot write."""
    with group_of(2, over="unix") as (first, second):
        first.start()
        second.start()
        first.agent.connect(first.peer(second))
        wait_until(lambda: second.peer(first).link is not None, "the link")
        link = second.peer(first).link
        assert link is not None
        wait_until(link.claim, "the right to read")
        try:
            first.agent.links.leave_reason = "it had to go"
            first.close()
            writer = threading.Thread(target=post_until_lost, args=(second, second.peer(first)))
            writer.start()
            writer.join(0.05)
            assert second.peer(first).lost is None
            second.agent.receiver.read(second.peer(first), link)
        finally:
            link.unclaim()
        writer.join(LIMIT_S)
        assert second.peer(first).lost_error().cause == "it had to go"


def post_until_lost(member: Member, peer: Peer) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while peer.lost is None and time.monotonic() < limit_s:
        member.agent.sender.post_ints(peer, Kind.RELEASE_CONTEXT, 0)


def leave_while_accepted(first: Member, second: Member, has_left: threading.Event) -> str:
    """Makes ``first`` dial ``second`` and leave; returns the cause that ``second`` records."""
    first.start()
    second.start()
    first.agent.connect(first.peer(second))
    first.agent.links.leave_reason = "it had to go"
    first.close()
    has_left.set()
    wait_until(lambda: second.peer(first).lost, "the loss")
    return second.peer(first).lost_error().cause


def test_a_dialler_that_leaves_before_its_greeting_was_answered_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_left, dialler = threading.Event(), threading.get_ident()

    def send_fds(*arguments: Any) -> int:
        size = socket.send_fds(*arguments)
        # Only the acceptor waits; the dialler sends its memory with this function too.
        assert threading.get_ident() == dialler or has_left.wait(LIMIT_S)
        return size

    slow_socket = types.SimpleNamespace(**vars(socket) | {"send_fds": send_fds})
    monkeypatch.setattr(handshake, "socket", slow_socket)
    with group_of(2) as (first, second):
        assert leave_while_accepted(first, second, has_left) == "it had to go"


def test_a_dialler_that_leaves_before_the_verdict_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    has_left, is_accepted = threading.Event(), threading.Event()
    greet, on_readable = connecting.Acceptor.greet, Receiver.on_readable
    verdict = connecting.send_verdict

    def send_verdict(*arguments: Any) -> None:
        assert has_left.wait(LIMIT_S)
        verdict(*arguments)

    def note_accepted(*arguments: Any) -> None:
        greet(*arguments)
        is_accepted.set()

    def read_after_it(receiver: Receiver, *arguments: Any) -> None:
        if receiver is second.agent.receiver:
            assert is_accepted.wait(LIMIT_S)
        on_readable(receiver, *arguments)

    monkeypatch.setattr(connecting, "send_verdict", send_verdict)
    monkeypatch.setattr(connecting.Acceptor, "greet", note_accepted)
    monkeypatch.setattr(Receiver, "on_readable", read_after_it)
    with group_of(2) as (first, second):
        assert leave_while_accepted(first, second, has_left) == "it had to go"


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_a_worker_that_answers_that_it_dials_itself_is_not_lost(over: str) -> None:
    """It is dialled again; ``protocol/test_connecting.py`` shows that no time limit ends that."""
    with group_of(2, over=over) as (first, second):
        first.start()
        second.start()
        connecting = second.peer(first).connecting
        connecting.want(time.monotonic(), math.inf, LIMIT_S, "a session")
        assert connecting.offer()
        assert connecting.state is State.DIALLING
        attempts: list[int] = []

        def note(now_s: float, failure: Failure, cause: str) -> Step:
            attempts.append(1)
            assert failure is Failure.CROSSED
            if len(attempts) == 4:
                make_offer_void(second.peer(first))
            return dial_failed(now_s, failure, cause)

        machine: Any = first.peer(second).connecting
        dial_failed, machine.dial_failed = machine.dial_failed, note
        link = first.agent.connect(first.peer(second), time.monotonic() + LIMIT_S)
        assert len(attempts) == 4
        assert first.peer(second).link is link
        assert first.peer(second).lost is None


def make_offer_void(peer: Peer) -> None:
    """Makes a worker give up dialling, as if it had never offered a connection."""
    with peer.state_lock:
        peer.connecting = Connecting(peer.id, peer.name)


@pytest.mark.parametrize("attempt", [-1, 0, 1, None, "2", True, 1.5])
def test_an_attempt_that_is_not_the_latest_does_not_disturb(pair: Pair, attempt: object) -> None:
    pair.check()
    facts = {
        "purpose": "resume",
        "session": pair.terms[1].name,
        "position": 0,
        "attempt": attempt,
    }
    assert greet(pair, facts) is None
    pair.check(3)
    assert pair.links[1].resumption_count == 0


@pytest.mark.parametrize("position", [-1, "0", True])
def test_a_position_that_is_none_does_not_disturb(pair: Pair, position: object) -> None:
    facts = {
        "purpose": "resume",
        "session": pair.terms[1].name,
        "position": position,
        "attempt": 2,
    }
    assert greet(pair, facts) is None
    pair.check()
    assert pair.links[1].resumption_count == 0


def test_a_position_at_which_nothing_was_sent_is_the_loss(pair: Pair) -> None:
    facts = {"purpose": "resume", "session": pair.terms[1].name, "position": 1 << 40, "attempt": 2}
    greet(pair, facts)
    wait_until(lambda: pair.acceptor.peer(pair.dialler).lost)
    assert "cannot go on" in pair.lost()[-1]


def test_only_the_side_that_dialled_resumes(pair: Pair) -> None:
    connecting, terms = pair.acceptor.peer(pair.dialler).connecting, pair.terms[1]
    connecting.session = terms._replace(was_dialled=True)
    facts = {"purpose": "resume", "session": terms.name, "position": 0, "attempt": 2}
    assert greet(pair, facts) is None
    connecting.session = terms
    pair.check()
    assert pair.links[1].resumption_count == 0


def test_an_earlier_greeting_that_is_slow_does_not_replace_the_session(pair: Pair) -> None:
    """The greeting was in flight when the dialler gave up its attempt and made another."""
    agent, peer = pair.acceptor.agent, pair.acceptor.peer(pair.dialler)
    link = pair.links[1]
    ours, theirs = socket.socketpair()
    with theirs:
        terms = pair.terms[1]._replace(attempt=0)
        late = agent.links.make_link(ours, peer, terms)
        with pytest.raises(LinkClosed, match="slower"):
            agent.links.adopt(peer, late, terms)
        assert ours.fileno() == -1
    assert peer.link is link
    pair.check()


@pytest.mark.parametrize("purpose", ["resume", "probe"])
def test_a_session_that_is_only_being_made_is_to_be_tried_again(purpose: str) -> None:
    """The session's connection broke before this side had finished the handshake."""
    with group_of(2, over="tcp") as members:
        for member in members:
            member.start()
        peer = members[1].peer(members[0])
        offered = peer.connecting.hello(1, Hello(Purpose.LINK, session="?", attempt=1))
        assert offered.verdict is Verdict.ACCEPT
        facts = {"purpose": purpose, "session": "?", "position": 0, "attempt": 2}
        assert greet_at(members[1], facts) is None
        peer.connecting.accept_failed()
        answer = greet_at(members[1], facts)
        assert answer is not None
        assert answer.refusal == "there is no such session"
