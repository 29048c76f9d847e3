"""Which connections have a ring, and that messages arrive where the system refuses a ring."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from tests.unit.engine.worker.group import group_of, wait_until
from torchweft.engine.wire.frames import encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.native import native, reason

pytestmark = pytest.mark.skipif(native is None, reason=reason)


def rings_of(over: str = "unix", offered: tuple[bool, bool] = (True, True)) -> tuple[bool, bool]:
    """Connects two members, sends messages both ways, and returns which side has a ring."""
    with group_of(2, over=over) as members:
        came: list[tuple[int, int]] = []
        for member, offers_ring in zip(members, offered, strict=True):
            member.agent._connector.offers_ring = offers_ring
            me = member.agent.info.id
            note = came.append
            member.agent.receiver.on(
                Kind.POST,
                lambda _, frame, me=me, note=note: note((me, frame.id)),
                inline=True,
            )
            member.start()
        first, second = members
        first.agent.connect(first.peer(second))
        wait_until(lambda: second.peer(first).link is not None)
        for one, other in ((first, second), (second, first)):
            link = one.peer(other).link
            assert link is not None
            for number in range(5):
                link.send(encode_frame(Kind.POST, 0, number, b"x" * 300_000), may_block=True)
        wait_until(lambda: len(came) == 10)
        assert sorted(came) == [(me, number) for me in (0, 1) for number in range(5)]
        links = first.peer(second).link, second.peer(first).link
        return tuple(link is not None and link._has_ring for link in links)  # type: ignore[return-value]


@pytest.mark.parametrize("offered", [(True, False), (False, True), (False, False)])
def test_there_is_no_ring_where_a_side_offers_none(offered: tuple[bool, bool]) -> None:
    assert rings_of(offered=offered) == (False, False)


def test_the_socket_carries_messages_where_memory_is_refused() -> None:
    with mock.patch.object(os, "memfd_create", side_effect=PermissionError(1, "refused")):
        assert rings_of() == (False, False)
