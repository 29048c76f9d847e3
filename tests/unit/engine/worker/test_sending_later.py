"""A message that is not urgent travels with the next one to the same worker, or soon by itself."""

from __future__ import annotations

import pytest

from tests.unit.engine.worker.group import Member, group_of, wait_until
from torchweft.engine.wire.frames import encode_frame
from torchweft.engine.wire.messages import Kind, decode_ints, encode_ints


def started(members: list[Member]) -> tuple[Member, Member, list[int]]:
    """Starts two members; returns them, and the numbers that the second one will have received."""
    first, second = members
    numbers: list[int] = []
    second.agent.receiver.on(
        Kind.RELEASE_CONTEXT,
        lambda _, frame: numbers.extend(decode_ints(frame.control)),
        inline=True,
    )
    for member in members:
        member.start()
    return first, second, numbers


def connected(members: list[Member]) -> tuple[Member, Member, list[int]]:
    """Starts two members, and has the first one connect to the second one."""
    first, second, numbers = started(members)
    send_now(first, second, 0)
    wait_until(lambda: numbers == [0])
    return first, second, numbers


def send_now(first: Member, second: Member, number: int) -> None:
    part = encode_frame(Kind.RELEASE_CONTEXT, 0, 0, encode_ints(number))
    first.agent.sender.send(first.peer(second), part)


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_a_message_for_later_goes_with_the_next_one_and_before_it(over: str) -> None:
    with group_of(2, over=over) as members:
        first, second, numbers = connected(members)
        first.agent.reactor.on_unarmed = lambda: None  # The timer thread does not look after it.
        peer = first.peer(second)
        first.agent.sender.post_ints_later(peer, Kind.RELEASE_CONTEXT, 1)
        assert peer.link is not None
        assert peer.link.has_queued
        send_now(first, second, 2)
        wait_until(lambda: numbers == [0, 1, 2])


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_a_message_for_later_goes_by_itself_if_no_other_one_comes(over: str) -> None:
    with group_of(2, over=over) as members:
        first, second, numbers = connected(members)
        first.agent.sender.post_ints_later(first.peer(second), Kind.RELEASE_CONTEXT, 1)
        wait_until(lambda: numbers == [0, 1])


def test_a_message_for_later_is_the_first_one_to_a_worker_without_a_connection() -> None:
    with group_of(2) as members:
        first, second, numbers = started(members)
        first.agent.sender.post_ints_later(first.peer(second), Kind.RELEASE_CONTEXT, 1)
        wait_until(lambda: numbers == [1])


def test_a_message_for_later_to_a_lost_worker_is_dropped() -> None:
    with group_of(2) as members:
        first, second, _ = connected(members)
        peer = first.peer(second)
        second.close()
        wait_until(lambda: peer.lost is not None)
        first.agent.sender.post_ints_later(peer, Kind.RELEASE_CONTEXT, 1)
