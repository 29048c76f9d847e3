"""A message that is not urgent goes to no worker that is lost."""

from __future__ import annotations

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


def test_a_message_for_later_to_a_lost_worker_is_dropped() -> None:
    with group_of(2) as members:
        first, second, _ = connected(members)
        peer = first.peer(second)
        second.close()
        wait_until(lambda: peer.lost is not None)
        first.agent.sender.post_ints_later(peer, Kind.RELEASE_CONTEXT, 1)
