"""A group of workers of which this process knows, and nothing else of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchweft.agent import current
from torchweft.agent.members import Members
from torchweft.protocol.membership import Registration


def join(patch: pytest.MonkeyPatch, size: int, rank: int = 0) -> Members:
    """Makes this process worker ``rank`` of ``worker0``, ``worker1`` and so on, for a test."""
    everybody = [Registration(f"worker{number}", number, ("unix:@x",)) for number in range(size)]
    me = everybody.pop(rank)
    members = Members(me, everybody, is_open=False)
    agent = SimpleNamespace(info=members.me.info, members=members, find=members.find)
    patch.setattr(current, "_current", agent)
    return members


def stay_outside(patch: pytest.MonkeyPatch, size: int, rank: int = 0) -> None:
    """Makes this process one that is to join later, as its launcher has told it."""
    patch.setenv("WORLD_SIZE", str(size))
    patch.setenv("RANK", str(rank))
