"""A worker of a simulated group that leaves as the machine of its group decides."""

from __future__ import annotations

from typing import Any

from tests.simulation.group_member import Member, Request
from torchweft.engine.protocol.leaving import (
    Action,
    BeginSettling,
    ClosedLeaving,
    Left,
    Look,
    OpenLeaving,
    ProbeLater,
    Report,
    Retire,
    Send,
    Step,
)

PROBE_PAUSE_S = 0.05


class LeavingMember(Member):
    """A worker that wants to leave at the end of its program.

    It reports to the test by ``group.run``: ``on_settle`` before the leader says that the group is
    quiet, and ``on_left`` with the action when the machine lets this worker go.
    """

    machine: OpenLeaving | ClosedLeaving

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.retired: set[int] = set()
        self.endings: list[Left] = []
        self._is_settling = False

    def callable_peers(self) -> list[int]:
        return [peer for peer in super().callable_peers() if peer not in self.retired]

    def on_finished(self) -> None:
        self.act(self.machine.begin())
        for peer, half in self.node.halves.items():
            if not half.is_lost:
                self.act(self.machine.member_present(peer))

    def on_message(self, peer: int, message: tuple[Any, ...]) -> None:
        _, step, *arguments = message
        self.act(self.machine.received(peer, step, arguments))

    def on_lost(self, peer: int, cause: str) -> None:
        super().on_lost(peer, cause)
        self.act(self.machine.member_lost(peer))

    def on_tick(self) -> None:
        if self.machine.is_watched:
            self._look()

    def _look(self) -> None:
        references = self.group.references.machines[self.id]
        is_settled = self._is_settling and references.is_settled()
        report = Report(self.is_idle, self.activity)
        self.act(self.machine.observed(report, is_settled=is_settled))

    def take(self, peer: int, message: Any) -> None:
        if not (self.is_gone and isinstance(message, Request)):  # It is not served any more.
            super().take(peer, message)

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                if action.step is Step.SETTLE:
                    self.group.run.on_settle()
                self.send(action.to, ("step", action.step, *action.arguments))
            elif isinstance(action, Look):
                self._look()
            elif isinstance(action, ProbeLater):
                self.node.clock.later(PROBE_PAUSE_S, self._probe_again)
            elif isinstance(action, Retire):
                self.retired.add(action.worker)
            elif isinstance(action, BeginSettling):
                self._is_settling = True
                self.group.references.drop_all(self.id)
            elif isinstance(action, Left):
                self.endings.append(action)
                self.group.run.on_left(self, action)

    def _probe_again(self) -> None:
        self.act(self.machine.probe_again())

    def are_last_words_heard(self) -> bool:
        """Returns whether all that it has sent has arrived at workers that it has not lost."""
        return all(
            half.is_lost or half.outgoing.acknowledged >= half.message_position
            for half in self.node.halves.values()
        )
