"""A connection breaks, or is made again, between two steps of the thread that installs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.engine.worker.group import LIMIT_S, group_of, wait_until
from tests.unit.engine.worker.sessions import Pair, pair_of
from torchweft.engine.worker.connections import Links


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of() as made:
        yield made


def test_nobody_resumes_a_session_before_its_first_connection_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session is known from ``_give`` on, and its connection may break at once."""
    give, taken = Links._give, list[bool]()

    def try_to_resume(links: Links, peer: Any, link: Any, terms: Any) -> str:
        obstacle = give(links, peer, link, terms)
        thread = threading.Thread(target=lambda: taken.append(link.resuming.acquire(False)))
        thread.start()
        thread.join(LIMIT_S)
        return obstacle

    monkeypatch.setattr(Links, "_give", try_to_resume)
    with group_of(2, over="tcp") as members:
        Pair(members).check()
    assert taken == [False, False]


@pytest.mark.parametrize("step", ["watch_writing", "watch_reading"])
def test_a_connection_that_breaks_while_it_is_being_watched_is_not_watched(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The break stops the watching of both descriptors, before this thread has begun it."""
    member, other = pair.dialler, pair.acceptor
    reactor, link = member.agent.reactor, member.session(other)
    monkeypatch.setattr(member.agent.links, "redial", lambda peer, link: None)
    member.agent.links.pause(link)
    watch: Callable[..., None] = getattr(reactor, step)

    def break_first(*watched: object) -> None:
        link.break_off("it broke")
        watch(*watched)

    monkeypatch.setattr(reactor, step, break_first)
    member.agent.links._watch(member.peer(other), link)
    assert link.is_broken
    assert not {link.read_fd, link.write_fd} & reactor._handlers.keys()
    # Nobody makes the connection again, so that neither side must wait for the other at its end.
    member.agent.lose(member.peer(other), "it broke")
    other.agent.lose(other.peer(member), "it broke")


def test_who_waited_to_redial_finds_a_session_that_was_resumed_meanwhile(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialler, peer, link = pair.dialler, pair.dialler.peer(pair.acceptor), pair.links[0]
    connector, dialled = dialler.agent._connector, list[str]()
    for name in ("resume", "probe"):
        monkeypatch.setattr(connector, name, lambda *_, name=name: dialled.append(name))
    contact = peer.connecting._contact
    assert contact is not None
    contact.is_broken = contact.is_dialling = True  # This side was told to dial.
    with link.resuming:
        waiting = threading.Thread(target=connector.redial, args=(peer, link))
        waiting.start()
        with peer.state_lock:
            peer.connecting.resumed(time.monotonic())
    waiting.join(LIMIT_S)
    assert dialled == []
    with peer.state_lock:
        contact.is_broken = contact.is_dialling = True
    connector.redial(peer, link)
    assert dialled == ["resume"]
    with peer.state_lock:
        peer.connecting.resumed(time.monotonic())
    wait_until(lambda: pair.is_sound)
