"""Checks that the simulation of open groups finds faults injected into ``OpenLeaving``."""

from __future__ import annotations

import pytest

from tests.simulation.test_open_groups_simulated import Run, come_and_die, come_and_go
from tests.tools.simulation.failing import fails
from torchweft.engine.protocol.leaving import (
    Action,
    BeginSettling,
    Left,
    OpenLeaving,
    Report,
    Stage,
    Step,
)

PROGRAMS = (come_and_go, come_and_die)
SEEDS = 100
"""A fault must be found within this many runs of each program."""


class WaitsForNobody(OpenLeaving):
    """Does not wait until all members have answered."""

    def member_present(self, member: int) -> list[Action]:
        actions = super().member_present(member)
        self._unanswered.clear()
        return actions


class TellsNoNewcomer(OpenLeaving):
    """Does not tell workers that join while it leaves."""

    def observed(self, report: Report, *, is_settled: bool) -> list[Action]:
        self._has_begun = True
        return super().observed(report, is_settled=is_settled)

    def member_present(self, member: int) -> list[Action]:
        is_newcomer = self.stage is not Stage.MEMBER and getattr(self, "_has_begun", False)
        return [] if is_newcomer else super().member_present(member)


class TellsNobodyThatLeaves(OpenLeaving):
    """Does not tell members that are leaving themselves."""

    def received(self, member: int, step: int, arguments: list[int]) -> list[Action]:
        if step == Step.LEAVING:
            self.__dict__.setdefault("departing", set()).add(member)
        return super().received(member, step, arguments)

    def member_present(self, member: int) -> list[Action]:
        is_departing = member in self.__dict__.get("departing", ())
        return [] if is_departing else super().member_present(member)


class DoesNotAnswer(OpenLeaving):
    """Makes no more calls to a leaving member, but does not answer it."""

    def received(self, member: int, step: int, arguments: list[int]) -> list[Action]:
        return super().received(member, step, arguments)[:1]


class CallsOn(OpenLeaving):
    """Answers a leaving member, but still calls it."""

    def received(self, member: int, step: int, arguments: list[int]) -> list[Action]:
        return super().received(member, step, arguments)[1:]


class ForgetsTheDead(OpenLeaving):
    """Waits for the answers of lost members."""

    def member_lost(self, member: int) -> list[Action]:
        return []


class LeavesWhileItServes(OpenLeaving):
    """Drops its references and leaves before it is idle."""

    def observed(self, report: Report, *, is_settled: bool) -> list[Action]:
        return super().observed(Report(True, report.activity), is_settled=True)


class KeepsItsReferences(OpenLeaving):
    """Leaves without dropping its references."""

    def observed(self, report: Report, *, is_settled: bool) -> list[Action]:
        actions = super().observed(report, is_settled=is_settled)
        if BeginSettling() in actions:
            self.stage = Stage.LEFT
            return [Left()]
        return actions


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "mutant",
    [
        WaitsForNobody,
        TellsNoNewcomer,
        TellsNobodyThatLeaves,
        DoesNotAnswer,
        CallsOn,
        ForgetsTheDead,
        LeavesWhileItServes,
        KeepsItsReferences,
    ],
)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, mutant: type[OpenLeaving]) -> None:
    monkeypatch.setattr("tests.simulation.test_open_groups_simulated.OpenLeaving", mutant)
    assert any(fails(program, Run(seed)) for seed in range(SEEDS) for program in PROGRAMS)
