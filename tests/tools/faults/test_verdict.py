"""Tests that every deviation from the required outcome is found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.plan import (
    CUTS,
    HEAD,
    KILL,
    LEFT,
    MEMORY,
    NAMES,
    RIGHT,
    TRAINER,
    UNIX,
    Fault,
    Plan,
)
from tests.faults.running import Ending, Outcome
from tests.faults.verdict import MARGIN_S, problems
from tests.faults.worker import Complaint, Report

RESULT = "the result"
LOSS = Complaint("WorkerLost", "left is lost", True, (LEFT,), False)
NO_MEMORY = Complaint("MemoryError", "none", False, (), True)
RANKS = {name: rank for rank, name in enumerate(NAMES)}


def plan_of(kind: str, point: str = "") -> Plan:
    return Plan(0, UNIX, False, RANKS, (Fault(kind, LEFT, point),))


def outcome_of(**reports: Report) -> Outcome:
    endings = {name: Ending(0, 2.0, reports.get(name, Report(ended_s=2.0))) for name in NAMES}
    trained = endings[TRAINER].report
    assert trained is not None
    trained.result = RESULT
    return Outcome(endings, [1.0])


def lost_outcome() -> Outcome:
    reports = {name: Report([LOSS], ended_s=2.0) for name in (TRAINER, RIGHT, HEAD)}
    outcome = outcome_of(**reports)
    outcome.endings[LEFT] = Ending(-9, 1.0)
    return outcome


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("leaks", ["threads: weft-1"], "head: left threads: weft-1"),
        ("left", {"left": {"owned": 1}}, "head: left ('left', {'owned': 1})"),
        ("noise", ["an error"], "head: said an error"),
        ("errors", [LOSS], "head: WorkerLost ('left',): left is lost"),
    ],
)
def test_what_a_worker_leaves_or_says_is_found(field: str, value: Any, found: str) -> None:
    report = Report(ended_s=2.0)
    setattr(report, field, value)
    assert problems(plan_of(CUTS), outcome_of(head=report), RESULT) == [found]


def test_a_fault_that_did_not_strike_must_not_be_noticed() -> None:
    outcome = lost_outcome()
    outcome.struck_s = [None]
    wrong = problems(plan_of(KILL), outcome, RESULT)
    assert len(wrong) == len(NAMES) + 1
    assert "left: ended with -9, not with 0" in wrong


def test_a_loss_must_be_noticed_in_time_and_by_a_typed_error_that_names_the_worker() -> None:
    outcome = lost_outcome()
    outcome.endings[RIGHT].report = Report([], ended_s=2.0)
    outcome.endings[HEAD].report = Report([NO_MEMORY], ended_s=1.1 + MARGIN_S)
    outcome.endings[TRAINER].report = None
    wrong = problems(plan_of(KILL), outcome, RESULT)
    assert [problem.split(" 5")[0] for problem in wrong] == [
        "trainer: reported nothing",
        "right: noticed nothing",
        "head: ended",
        "head: an error that is none of Weft's: MemoryError: none",
        "head: no error names a lost worker: MemoryError (): none",
    ]


def test_a_victim_that_lives_on_is_found() -> None:
    outcome = lost_outcome()
    outcome.endings[LEFT] = Ending(0, 2.0, Report())
    assert problems(plan_of(KILL), outcome, RESULT) == ["left: ended with 0, not with -9"]


def test_an_error_of_a_call_must_be_raised_by_the_trainer_alone() -> None:
    outcome = outcome_of(head=Report([NO_MEMORY], ended_s=2.0))
    assert problems(plan_of(MEMORY), outcome, RESULT) == [
        "trainer: was to have one MemoryError, but has none",
        "head: MemoryError (): none",
    ]
