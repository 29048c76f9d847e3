from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tests.unit.agent.group import Member, group_of, wait_until
from tests.unit.transport.reading import not_main  # noqa: F401
from torchweft.autograd.codec import PassMode, PassName
from torchweft.autograd.contexts import Context
from torchweft.autograd.graph import LocalPass
from torchweft.autograd.listening import Listener, Reading
from torchweft.autograd.pass_state import LedPassState
from torchweft.transport.link import READ_TICK_S, Link
from torchweft.transport.spinning import Spinning

pytestmark = pytest.mark.usefixtures("not_main")


@pytest.fixture(params=["unix", "tcp"])
def trio(request: pytest.FixtureRequest) -> Iterator[list[Member]]:
    with group_of(3, over=request.param) as members:
        for member in members:
            member.start()
        for other in members[1:]:
            members[0].agent.connect(members[0].peer(other))
        yield members


def links_of(trio: list[Member]) -> list[Link]:
    links = [trio[0].peer(other).link for other in trio[1:]]
    assert all(link is not None for link in links)
    return links  # type: ignore[return-value]


def test_connections_are_taken_over_and_given_back(trio: list[Member]) -> None:
    listener = Listener(trio[0].agent)
    peers = [trio[0].peer(other) for other in trio[1:]]
    taken: list[Reading] = []

    def takes_over() -> bool:
        # It may not while another thread reads the first messages of a connection.
        taken.append(listener.take_over(peers))
        return bool(taken[-1])

    wait_until(takes_over)
    reading = taken[-1]
    assert [link for _, link in reading] == links_of(trio)
    assert all(0 in link.readers for link in links_of(trio))
    listener.give_back(reading)
    assert not any(0 in link.readers for link in links_of(trio))


def test_nothing_is_read_of_a_worker_that_was_lost_before(trio: list[Member]) -> None:
    """The lost worker's connection has no descriptors any more."""
    first = trio[0]
    peers = [first.peer(other) for other in trio[1:]]
    first.agent.lose(peers[1], "a test")
    lost = links_of(trio)[1]
    wait_until(lambda: lost.is_free and 0 not in lost.readers)
    listener = Listener(first.agent)
    assert listener.take_over(peers) == []
    assert not any(0 in link.readers for link in links_of(trio))


def test_a_broken_session_is_waited_for_without_a_spin(
    trio: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trio[0]
    peers = [first.peer(other) for other in trio[1:]]
    if links_of(trio)[0]._socket.family == socket.AF_UNIX:
        pytest.skip("there are sessions over TCP only")
    listener = Listener(first.agent)
    reading = listener.take_over(peers)
    reads = 0
    read = first.agent.receiver.read

    def count(*args: object, **options: object) -> bool:
        nonlocal reads
        reads += 1
        return read(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(first.agent.receiver, "read", count)
    links_of(trio)[0].stop()  # type: ignore[attr-defined]
    listener.read_until(reading, [], time.monotonic() + 5 * READ_TICK_S)
    assert 1 <= reads <= 12
    links_of(trio)[0].report_break("a test")  # type: ignore[attr-defined]
    listener.give_back(reading)


@pytest.mark.parametrize("count", [1, 2])
def test_the_main_thread_sleeps_where_spinning_is_not_worthwhile(
    trio: list[Member], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    first = trio[0]
    peers = [first.peer(other) for other in trio[1 : 1 + count]]
    assert links_of(trio)[0].may_be_interrupted
    wait_until(lambda: not any(0 in link.readers for link in links_of(trio)))
    monkeypatch.setattr(Spinning, "is_worthwhile", lambda _: False)
    reads = 0
    kind = type(links_of(trio)[0])
    receive_own = kind.receive_own

    def count_reads(link: Link, reader: list[int], **options: bool) -> object:
        nonlocal reads
        reads += 1
        return receive_own(link, reader, **options)

    monkeypatch.setattr(kind, "receive_own", count_reads)
    name = PassName(1, 1, 1, PassMode())
    led = LedPassState(0, name, LocalPass(Context(1, 0)), timeout_s=3 * READ_TICK_S)
    Listener(first.agent).lead_in_main(peers, lambda: None, led)
    assert 1 <= reads <= 8 * count  # A late message of a member ends the wait.
    assert not any(0 in link.readers for link in links_of(trio))
