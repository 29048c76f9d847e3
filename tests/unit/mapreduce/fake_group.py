"""A fake group of workers: this process knows its members, and nothing else exists."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchweft.engine.protocol.registration import Registration
from torchweft.engine.worker import current
from torchweft.engine.worker.peers import Members


def join(patch: pytest.MonkeyPatch, size: int, rank: int = 0) -> Members:
    """Makes this process worker ``rank`` of ``worker0``, ``worker1`` and so on, for a test."""
    everybody = [Registration(f"worker{number}", number, ("unix:@x",)) for number in range(size)]
    me = everybody.pop(rank)
    members = Members(me, everybody, is_open=False)
    agent = SimpleNamespace(info=members.me.info, members=members, find=members.find)
    patch.setattr(current, "here", agent)
    return members


def stay_outside(patch: pytest.MonkeyPatch, size: int, rank: int = 0) -> None:
    """Sets the launcher's variables of a process that has not joined its group yet."""
    patch.setenv("WORLD_SIZE", str(size))
    patch.setenv("RANK", str(rank))
