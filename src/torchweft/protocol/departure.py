"""Leaving an open group: one worker goes while the others work on.

The leaver tells every other member that it leaves (``LEAVING``) and waits until each has answered
(``NOTED``). A member makes no new calls to it from then on, and sessions keep order: the answer
comes behind all calls that the member had sent. The leaver then serves until it is idle, drops its
references, and leaves when their owners have heard of it. See ``docs/protocols/membership.md``.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from torchweft.errors import ProtocolError
from torchweft.protocol.shutdown import Send, Step


class Stage(enum.Enum):
    """How far a worker is in leaving its group."""

    MEMBER = enum.auto()
    ANNOUNCING = enum.auto()
    FINISHING = enum.auto()
    SETTLING = enum.auto()
    LEFT = enum.auto()


class Retire(NamedTuple):
    """An action: make no new calls to ``worker``, which leaves, and free its name and rank."""

    worker: int


class BeginSettling(NamedTuple):
    """An action: drop all references."""


class Left(NamedTuple):
    """An action: close the connections; nobody needs this worker any more."""


Action = Send | Retire | BeginSettling | Left


class Departure:
    """One worker's part in departures of an open group: its own, and those of other members.

    Methods take events and return actions, in order. Not thread-safe.

    Attributes:
        stage: How far this worker is itself.
    """

    def __init__(self) -> None:
        self.stage = Stage.MEMBER
        self._unanswered: set[int] = set()

    @property
    def unanswered(self) -> tuple[int, ...]:
        """The members that have not answered the announcement."""
        return tuple(sorted(self._unanswered))

    def begin(self) -> None:
        """This worker wants to leave; ``member_present`` follows for each other member."""
        self.stage = Stage.ANNOUNCING

    def member_present(self, member: int) -> list[Action]:
        """Another member is there, or has just joined. A worker that leaves must tell it so.

        Also one that is leaving itself: it serves others until it goes, and calls on for them.
        """
        is_leaving = self.stage not in (Stage.MEMBER, Stage.LEFT)
        if not is_leaving or member in self._unanswered:
            return []
        self._unanswered.add(member)
        return [Send(member, Step.LEAVING)]

    def received(self, member: int, step: int) -> list[Action]:
        """A member has said something.

        Raises:
            ProtocolError: That step does not belong to open groups.
        """
        if step == Step.NOTED:
            self._unanswered.discard(member)
            return []
        if step != Step.LEAVING:
            raise ProtocolError(f"shutdown step {step} is for closed groups")
        return [Retire(member), Send(member, Step.NOTED)]

    def member_lost(self, member: int) -> None:
        """A member has left or is lost: it answers nothing any more."""
        self._unanswered.discard(member)

    def observed(self, *, is_idle: bool, is_settled: bool) -> list[Action]:
        """Goes on as far as the state of this worker allows.

        Args:
            is_idle: Whether it runs no call of others, and waits for none of its own.
            is_settled: Whether the owners of all references that it dropped have heard of it.
        """
        actions: list[Action] = []
        if self._unanswered:
            return actions
        if self.stage is Stage.ANNOUNCING:
            self.stage = Stage.FINISHING
        if not is_idle:
            return actions  # Also while it settles: one that joined meanwhile may have called it.
        if self.stage is Stage.FINISHING:
            self.stage = Stage.SETTLING
            actions.append(BeginSettling())
        elif self.stage is Stage.SETTLING and is_settled:
            self.stage = Stage.LEFT
            actions.append(Left())
        return actions
