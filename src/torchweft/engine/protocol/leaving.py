"""When a worker may leave its group: gracefully, when no other worker needs it.

A *closed* group has a number of workers and a leader, rank 0: all join together and leave together.
An *open* group has neither: workers come and go one by one. ``joining`` says how they join.

``OpenLeaving``: one worker leaves while the others work on. It tells every other member that it
leaves (``LEAVING``) and waits until each has answered (``NOTED``). A member that has answered makes
no new calls to it. Sessions keep order, so the answer comes behind all calls that the member had
sent. The leaver then serves until it is idle, drops its references, and leaves when their owners
have heard of it.

``ClosedLeaving`` and ``Leader``: all leave together, and the leader says when. A worker that calls
``shutdown`` says so to rank 0 and goes on serving. When all have said so, the leader finds out
whether the group is quiet. One probe is not enough, since a call may be on its way to a worker that
was just seen idle. So the leader probes in rounds: the group is quiet when all were idle in two
consecutive rounds, without activity in between. While a message is on its way, its sender is not
idle: it waits for the answer. Then all drop their references, and when the last owner has heard of
it, the leader closes the group. A worker that is lost on the way is left out, and named at the end.

All take the same events and return the same actions, so one shell serves them
(``torchweft.rpc.node``). See ``docs/protocols/membership.md``.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torchweft.engine.protocol.registration import LEADER
from torchweft.errors import ProtocolError


class Step(enum.IntEnum):
    """The step that a shutdown message announces. Its number is sent before the arguments."""

    READY = 1
    PROBE = 2
    REPORT = 3
    SETTLE = 4
    SETTLED = 5
    CLOSE = 6
    # In open groups, where workers leave one by one:
    LEAVING = 7
    NOTED = 8


LED_STEPS = frozenset({Step.PROBE, Step.SETTLE, Step.CLOSE})
"""Steps of a shutdown that the leader alone sends."""


class Send(NamedTuple):
    """An action: tell worker ``to`` a step, with its arguments."""

    to: int
    step: Step
    arguments: tuple[int, ...] = ()


class ProbeLater(NamedTuple):
    """An action: call ``probe_again`` after a short pause; the group is not quiet yet."""


class Missing(NamedTuple):
    """The ``workers`` that a shutdown waits for, and ``what`` is true of them."""

    what: str
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """One worker's answer to a probe: whether it is idle, and its activity count so far."""

    is_idle: bool
    activity: int


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


class Leaving(ABC):
    """One worker's part in how workers leave a group. Methods take events and return actions.

    Actions are to be carried out in order. Not thread-safe.

    Attributes:
        stage: How far this worker is.
    """

    stage = Stage.MEMBER

    @property
    @abstractmethod
    def is_watched(self) -> bool:
        """Whether to call ``observed`` repeatedly: the next stage depends on it."""

    @abstractmethod
    def begin(self) -> list[Action]:
        """Begins to leave."""

    @abstractmethod
    def received(self, member: int, step: int, arguments: list[int]) -> list[Action]:
        """Takes a member's message; raises ProtocolError if it is malformed or misplaced."""

    def member_present(self, member: int) -> list[Action]:
        """Takes a member that is present when this worker leaves, or that has just joined."""
        return []

    @abstractmethod
    def member_lost(self, member: int) -> list[Action]:
        """Takes the departure or loss of a member, which will send no more answers."""

    def connection_ended(self, member: int) -> list[Action]:
        """Takes a connection's end after the group went quiet: the member left or died."""
        return []

    @abstractmethod
    def observed(self, report: Report, *, is_settled: bool) -> list[Action]:
        """Advances as far as the state of this worker allows.

        Args:
            report: Whether it neither serves calls nor waits for its own, and its activity so far.
            is_settled: Whether the owners of all references that it dropped have heard of it.
        """

    def probe_again(self) -> list[Action]:
        """Takes the end of the pause of ``ProbeLater``."""
        return []

    @abstractmethod
    def missing(self) -> Missing:
        """Returns the workers that this worker waits for now, and why."""


class OpenLeaving(Leaving):
    """One worker's part in departures of an open group: its own, and those of other members."""

    def __init__(self) -> None:
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

    def missing(self) -> Missing:
        if self._unanswered:
            return Missing("had not answered", tuple(sorted(self._unanswered)))
        if self.stage is Stage.SETTLING:
            return Missing("had not let go of all references", ())
        return Missing("had calls under way", ())


class ClosedLeaving(Leaving):
    """The part of one worker in the shutdown of a closed group."""

    def __init__(self) -> None:
        self._probed: list[int] = []

    @property
    def is_watched(self) -> bool:
        return self.stage is Stage.SETTLING

    def begin(self) -> list[Action]:
        if self.stage is Stage.LEFT:  # The leader is lost.
            return []
        self.stage = Stage.SERVING
        return [Send(LEADER, Step.READY)]

    def received(self, member: int, step: int, arguments: list[int]) -> list[Action]:
        if step in LED_STEPS and member != LEADER:
            raise ProtocolError(
                f"worker {member} sends shutdown step {step}, which rank {LEADER} alone sends"
            )
        if step == Step.PROBE and arguments:
            self._probed.append(arguments[0])
            return [Look()]
        if step == Step.SETTLE:
            self.stage = Stage.SETTLING
            return [ExpectEnds(), BeginSettling()]
        if step == Step.CLOSE:
            return self._leave(tuple(arguments))
        if step in (Step.READY, Step.REPORT, Step.SETTLED):
            raise ProtocolError(f"shutdown step {step} is for rank {LEADER} only")
        raise _no_such_message(step, arguments)

    def member_lost(self, member: int) -> list[Action]:
        return self._leave((LEADER,)) if member == LEADER else []

    def connection_ended(self, member: int) -> list[Action]:
        # No worker leaves before the leader has told all that every worker has settled: a worker
        # that is gone earlier has died.
        has_settled = self.stage in (Stage.SETTLED, Stage.LEFT)
        is_needed = self._needs(member)
        if has_settled and not is_needed:
            return []
        return [Lose(member), *(self.member_lost(member) if is_needed else [])]

    def _needs(self, member: int) -> bool:
        """Whether this worker cannot leave as planned without a member."""
        return member == LEADER and self.stage is not Stage.LEFT

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

    def missing(self) -> Missing:
        return Missing("had not said that all are done", (LEADER,))

    def _leave(self, lost: tuple[int, ...]) -> list[Action]:
        if self.stage is Stage.LEFT:
            return []
        self.stage = Stage.LEFT
        return [Left(lost)]


def _no_such_message(step: int, arguments: list[int]) -> ProtocolError:
    return ProtocolError(f"no shutdown message has step {step} and arguments {arguments}")


class Leader(ClosedLeaving):
    """The part of rank 0, which takes part as all others do, by messages to itself, and leads.

    Args:
        workers: Ranks of the group, including its own.
    """

    def __init__(self, workers: set[int]) -> None:
        super().__init__()
        self.workers = workers
        self.lost: set[int] = set()
        self.round = 0
        self.phase = Step.READY
        self._ready: set[int] = set()
        self._settled: set[int] = set()
        self._reports: dict[int, Report] = {}
        self._previous: dict[int, Report] = {}

    def begin(self) -> list[Action]:
        return [*super().begin(), Watch()]

    def received(self, member: int, step: int, arguments: list[int]) -> list[Action]:
        if step == Step.READY:
            self._ready.add(member)
        elif step == Step.SETTLED:
            self._settled.add(member)
        elif step == Step.REPORT:
            if len(arguments) < 3:
                raise _no_such_message(step, arguments)
            # Late answers to older rounds are ignored.
            if self.phase is Step.PROBE and arguments[0] == self.round:
                self._reports[member] = Report(bool(arguments[1]), arguments[2])
        elif step == Step.CLOSE and member == LEADER:
            return []  # It has told the others first, and has left.
        else:
            return super().received(member, step, arguments)
        return self._advance()

    def member_lost(self, member: int) -> list[Action]:
        if member in self.workers:
            self.workers.discard(member)
            self.lost.add(member)
        return self._advance()

    def _needs(self, member: int) -> bool:
        return self.phase is not Step.CLOSE

    def probe_again(self) -> list[Action]:
        if self.phase is not Step.PROBE:
            return []
        self.round += 1
        self._previous, self._reports = self._reports, {}
        return self._tell_all(Step.PROBE, self.round)

    def missing(self) -> Missing:
        if self.phase is Step.READY:
            return Missing("had not called shutdown", tuple(sorted(self.workers - self._ready)))
        if self.phase is Step.PROBE:
            known = {**self._previous, **self._reports}
            busy = {worker for worker in self.workers & known.keys() if not known[worker].is_idle}
            unknown = self.workers - known.keys()
            if busy and unknown:
                both = tuple(sorted(busy | unknown))
                return Missing("had calls under way, or did not answer", both)
            if busy:
                return Missing("had calls under way", tuple(sorted(busy)))
            silent = self.workers - self._reports.keys()
            return Missing("did not answer", tuple(sorted(silent)))
        unsettled = self.workers - self._settled if self.phase is Step.SETTLE else set()
        return Missing("had not let go of all references", tuple(sorted(unsettled)))

    def _advance(self) -> list[Action]:
        if self.phase is Step.READY and self.workers <= self._ready:
            self.phase = Step.PROBE
            return self.probe_again()
        if self.phase is Step.PROBE and self.workers <= self._reports.keys():
            if not self._is_quiet():
                return [ProbeLater()]
            self.phase = Step.SETTLE
            return self._tell_all(Step.SETTLE)
        if self.phase is Step.SETTLE and self.workers <= self._settled:
            self.phase = Step.CLOSE
            lost = tuple(sorted(self.lost))
            return [*self._tell_all(Step.CLOSE, *lost), *self._leave(lost)]
        return []

    def _is_quiet(self) -> bool:
        return all(
            self._reports[worker].is_idle and self._previous.get(worker) == self._reports[worker]
            for worker in self.workers
        )

    def _tell_all(self, step: Step, *arguments: int) -> list[Action]:
        return [Send(worker, step, arguments) for worker in sorted(self.workers)]
