"""Leaving a group gracefully: a worker leaves when no other worker needs it.

``OpenLeaving``: one worker leaves while the others work on. It tells every other member that it
leaves (``LEAVING``) and waits until each has answered (``NOTED``). A member that has answered makes
no new calls to it. Sessions keep order, so the answer comes behind all calls that the member had
sent. The leaver then serves until it is idle, drops its references, and leaves when their owners
have heard of it.

``ClosedLeaving``: all leave together, and the leader says when (``leader``). A worker says that it
is ready, answers probes, drops its references when the group is quiet, and leaves when the leader
says so.

Both take the same events and return the same actions, so one shell serves both
(``torchweft.rpc.node``). See ``docs/protocols/membership.md``.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

from torchweft.errors import ProtocolError
from torchweft.protocol.membership.leader import (
    Closed,
    Leader,
    Missing,
    ProbeLater,
    Report,
    Send,
    Step,
)
from torchweft.protocol.membership.registration import LEADER


class Stage(enum.Enum):
    """The stages of leaving a group."""

    MEMBER = enum.auto()
    ANNOUNCING = enum.auto()
    """The worker waits until the others know that it wants to leave."""
    SERVING = enum.auto()
    """It serves until no other worker needs it."""
    SETTLING = enum.auto()
    """It drops its references, and waits until their owners know."""
    SETTLED = enum.auto()
    """It waits until all workers of its closed group have settled."""
    LEFT = enum.auto()


class Retire(NamedTuple):
    """An action: make no new calls to ``worker``, which is leaving; free its name and rank."""

    worker: int


class Watch(NamedTuple):
    """An action: connect to all members, so that the loss of each is noticed."""


class Look(NamedTuple):
    """An action: call ``observed`` now."""


class ExpectEnds(NamedTuple):
    """An action: from now on, the end of a connection is no loss of a worker."""


class BeginSettling(NamedTuple):
    """An action: drop all references."""


class Lose(NamedTuple):
    """An action: declare ``worker``, whose connection has ended, lost."""

    worker: int


class Left(NamedTuple):
    """An action: close the connections. ``lost`` are the workers that could not take part."""

    lost: tuple[int, ...] = ()


Action = Send | Retire | Watch | Look | ExpectEnds | BeginSettling | ProbeLater | Lose | Left


class Leaving(Protocol):
    """One worker's part in how workers leave a group. Methods take events and return actions.

    Actions are to be carried out in order. Not thread-safe.

    Attributes:
        stage: How far this worker is.
    """

    stage: Stage

    @property
    def is_watched(self) -> bool:
        """Whether to call ``observed`` repeatedly: the next stage depends on it."""

    def begin(self) -> list[Action]:
        """Begins to leave."""

    def received(self, member: int, step: int, arguments: list[int]) -> list[Action]:
        """Takes a member's message; raises ProtocolError if it is malformed or misplaced."""

    def member_present(self, member: int) -> list[Action]:
        """Takes a member that is present when this worker leaves, or that has just joined."""

    def member_lost(self, member: int) -> list[Action]:
        """Takes the departure or loss of a member, which will send no more answers."""

    def connection_ended(self, member: int) -> list[Action]:
        """Takes a connection's end after the group went quiet: the member left or died."""

    def observed(self, report: Report, *, is_settled: bool) -> list[Action]:
        """Advances as far as the state of this worker allows.

        Args:
            report: Whether it neither serves calls nor waits for its own, and its activity so far.
            is_settled: Whether the owners of all references that it dropped have heard of it.
        """

    def probe_again(self) -> list[Action]:
        """Takes the end of the pause of ``ProbeLater``."""

    def missing(self) -> Missing:
        """Returns the workers that this worker waits for now, and why."""


class OpenLeaving:
    """One worker's part in departures of an open group: its own, and those of other members."""

    def __init__(self) -> None:
        self.stage = Stage.MEMBER
        self._unanswered: set[int] = set()

    @property
    def is_watched(self) -> bool:
        return self.stage not in (Stage.MEMBER, Stage.LEFT) and not self._unanswered

    def begin(self) -> list[Action]:
        self.stage = Stage.ANNOUNCING
        return []

    def received(self, member: int, step: int, arguments: list[int]) -> list[Action]:
        if step == Step.NOTED:
            self._unanswered.discard(member)
            return []
        if step != Step.LEAVING:
            raise ProtocolError(f"shutdown step {step} is for closed groups")
        return [Retire(member), Send(member, Step.NOTED)]

    def member_present(self, member: int) -> list[Action]:
        # Also to a member that is leaving: it serves, and calls others for that, until it leaves.
        is_leaving = self.stage not in (Stage.MEMBER, Stage.LEFT)
        if not is_leaving or member in self._unanswered:
            return []
        self._unanswered.add(member)
        return [Send(member, Step.LEAVING)]

    def member_lost(self, member: int) -> list[Action]:
        self._unanswered.discard(member)
        return []

    def connection_ended(self, member: int) -> list[Action]:
        return []  # Connections of an open group end with the worker, which is lost then.

    def observed(self, report: Report, *, is_settled: bool) -> list[Action]:
        if self._unanswered:
            return []
        if self.stage is Stage.ANNOUNCING:
            self.stage = Stage.SERVING
        if not report.is_idle:
            return []  # Also while settling: a new member may have called this one meanwhile.
        if self.stage is Stage.SERVING:
            self.stage = Stage.SETTLING
            return [BeginSettling()]
        if self.stage is Stage.SETTLING and is_settled:
            self.stage = Stage.LEFT
            return [Left()]
        return []

    def probe_again(self) -> list[Action]:
        return []

    def missing(self) -> Missing:
        if self._unanswered:
            return Missing("had not answered", tuple(sorted(self._unanswered)))
        if self.stage is Stage.SETTLING:
            return Missing("had not let go of all references", ())
        return Missing("had calls under way", ())


class ClosedLeaving:
    """One worker's part in the shutdown of a closed group; the leader's worker leads it, too.

    Args:
        me: This worker.
        members: All workers of the group.
    """

    def __init__(self, me: int, members: set[int]) -> None:
        self.stage = Stage.MEMBER
        self.leader = Leader(members) if me == LEADER else None
        self._probed: list[int] = []

    @property
    def is_watched(self) -> bool:
        return self.stage is Stage.SETTLING

    def begin(self) -> list[Action]:
        if self.stage is Stage.LEFT:  # The leader is lost.
            return []
        self.stage = Stage.SERVING
        watch: list[Action] = [] if self.leader is None else [Watch()]
        return [Send(LEADER, Step.READY), *watch]

    def received(self, member: int, step: int, arguments: list[int]) -> list[Action]:
        if step == Step.PROBE and arguments:
            self._probed.append(arguments[0])
            return [Look()]
        if step == Step.SETTLE:
            self.stage = Stage.SETTLING
            return [ExpectEnds(), BeginSettling()]
        if step == Step.CLOSE:
            # The leader has to tell the others first: it leaves on ``Closed``.
            return [] if self.leader is not None else self._leave(tuple(arguments))
        return self._lead(member, step, arguments)

    def _lead(self, member: int, step: int, arguments: list[int]) -> list[Action]:
        leader = self.leader
        if step == Step.READY and leader is not None:
            return self._as_leader(leader.worker_ready(member))
        if step == Step.REPORT and leader is not None and len(arguments) >= 3:
            report = Report(bool(arguments[1]), arguments[2])
            return self._as_leader(leader.worker_reported(member, arguments[0], report))
        if step == Step.SETTLED and leader is not None:
            return self._as_leader(leader.worker_settled(member))
        if step in (Step.READY, Step.SETTLED) or (step == Step.REPORT and leader is None):
            raise ProtocolError(f"shutdown step {step} is for rank {LEADER} only")
        raise ProtocolError(f"no shutdown message has step {step} and arguments {arguments}")

    def member_present(self, member: int) -> list[Action]:
        return []  # All members are present from the start.

    def member_lost(self, member: int) -> list[Action]:
        if self.leader is not None:
            return self._as_leader(self.leader.worker_lost(member))
        return self._leave((LEADER,)) if member == LEADER else []

    def connection_ended(self, member: int) -> list[Action]:
        # No worker leaves before the leader has told all that every worker has settled: a worker
        # that is gone earlier has died.
        has_settled = self.stage in (Stage.SETTLED, Stage.LEFT)
        if self.leader is None:
            is_needed = member == LEADER and self.stage is not Stage.LEFT
        else:
            is_needed = self.leader.phase is not Step.CLOSE
        if has_settled and not is_needed:
            return []
        return [Lose(member), *(self.member_lost(member) if is_needed else [])]

    def observed(self, report: Report, *, is_settled: bool) -> list[Action]:
        rounds, self._probed = self._probed, []
        actions: list[Action] = [
            Send(LEADER, Step.REPORT, (probe_round, int(report.is_idle), report.activity))
            for probe_round in rounds
        ]
        if self.stage is Stage.SETTLING and is_settled:
            self.stage = Stage.SETTLED
            actions.append(Send(LEADER, Step.SETTLED))
        return actions

    def probe_again(self) -> list[Action]:
        return [] if self.leader is None else self._as_leader(self.leader.probe_again())

    def missing(self) -> Missing:
        if self.leader is None:
            return Missing("had not said that all are done", (LEADER,))
        return self.leader.missing()

    def _as_leader(self, actions: list[Send | ProbeLater | Closed]) -> list[Action]:
        taken: list[Action] = []
        for action in actions:
            taken += self._leave(action.lost) if isinstance(action, Closed) else [action]
        return taken

    def _leave(self, lost: tuple[int, ...]) -> list[Action]:
        if self.stage is Stage.LEFT:
            return []
        self.stage = Stage.LEFT
        return [Left(lost)]
