"""Checks whether a run ended as it must."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.faults.plan import (
    CUT,
    EXIT,
    FATAL,
    KILL,
    LOST,
    MEMORY,
    OF_CONNECTING,
    OF_JOINING,
    PARTITION,
    RAISED,
    STARVE,
    SURVIVED,
    TORN,
    TRAINER,
    WENT_ON,
    Fault,
    Plan,
)
from tests.faults.points import EXIT_CODE
from tests.faults.running import Outcome
from tests.faults.worker import INIT_LIMIT_S, Report
from torchweft import knobs

MARGIN_S = 5.0
"""Time that a busy machine may take in addition to the time limits that were set."""

_JOINING_GRACE_S = 5.0
_CODES = {KILL: -9, EXIT: EXIT_CODE}


def problems(plan: Plan, outcome: Outcome, result: str) -> list[str]:
    """Returns the problems with how a run ended; none if it ended as it must.

    Args:
        plan: The plan of the run.
        outcome: The outcome of the run.
        result: The result of a run without faults.
    """
    return [*outcome.left, *_all_problems(plan, outcome, result)]


def must_have(plan: Plan, outcome: Outcome) -> str:
    """Returns how the run must have ended; faults that did not strike do not count."""
    kinds = {fault.kind for fault, _ in _struck(plan, outcome)}
    if kinds & set(FATAL):
        return WENT_ON if _can_go_on(plan, outcome) else LOST
    if STARVE in kinds:
        return TORN
    return RAISED if MEMORY in kinds else SURVIVED


def _can_go_on(plan: Plan, outcome: Outcome) -> bool:
    """Returns whether other workers compute lost parts again."""
    victims = {fault.victim for fault, _ in _struck(plan, outcome) if fault.kind in FATAL}
    return plan.program is not None and plan.program.may_rerun and TRAINER not in victims


def _struck(plan: Plan, outcome: Outcome) -> list[tuple[Fault, float]]:
    """Returns the faults that did strike, and when."""
    pairs = zip(plan.faults, outcome.struck_s, strict=True)
    return [(fault, struck_s) for fault, struck_s in pairs if struck_s is not None]


def _all_problems(plan: Plan, outcome: Outcome, result: str) -> Iterator[str]:
    expected = must_have(plan, outcome)
    codes = {
        fault.victim: _CODES[fault.kind]
        for fault, _ in _struck(plan, outcome)
        if fault.kind in _CODES
    }
    for name, ending in outcome.endings.items():
        if ending.exit_code != codes.get(name, 0):
            yield f"{name}: ended with {ending.exit_code}, not with {codes.get(name, 0)}"
        if name in codes:
            continue
        if ending.report is None:
            yield f"{name}: reported nothing"
            continue
        report = ending.report
        yield from (f"{name}: left {what}" for what in [*report.leaks, *report.left.items()])
        yield from (f"{name}: said {what}" for what in report.noise)
        yield from _CHECKS[expected](plan, outcome, name, report)
    trained = outcome.endings[TRAINER].report
    if expected in (SURVIVED, WENT_ON) and trained is not None and trained.result != result:
        yield f"another result: {trained.result or _shown(trained)}"


def _clean(plan: Plan, outcome: Outcome, name: str, report: Report) -> Iterator[str]:
    if report.errors:
        yield f"{name}: {_shown(report)}"


def _raised(plan: Plan, outcome: Outcome, name: str, report: Report) -> Iterator[str]:
    if name != TRAINER:
        yield from _clean(plan, outcome, name, report)
    elif len(report.errors) != 1 or not report.errors[0].is_memory:
        yield f"{name}: was to have one MemoryError, but has {_shown(report)}"


def _torn(plan: Plan, outcome: Outcome, name: str, report: Report) -> Iterator[str]:
    if name == TRAINER and not report.errors:
        yield f"{name}: noticed nothing"
    for error in report.errors:
        if not (error.is_typed or error.is_memory):
            yield f"{name}: an error that is none of Weft's: {error.type_name}: {error.text}"


def _lost(plan: Plan, outcome: Outcome, name: str, report: Report) -> Iterator[str]:
    fatal = [(fault, at_s) for fault, at_s in _struck(plan, outcome) if fault.kind in FATAL]
    victims = {fault.victim for fault, _ in fatal}
    begin_s = min(struck_s for _, struck_s in fatal)
    trained = outcome.endings[TRAINER].report
    if plan.program is not None and trained is not None and name not in victims:
        begin_s = max(begin_s, trained.trained_s)
    took_s, limit_s = report.ended_s - begin_s, _limit_s(plan, outcome, begin_s)
    if took_s > limit_s:
        yield f"{name}: ended {took_s:.1f} s after the fault; {limit_s:.1f} s are the most"
    for error in report.errors:
        if not error.is_typed:
            yield f"{name}: an error that is none of Weft's: {error.type_name}: {error.text}"
    # A worker that was told of the end before the leader died has no reason to complain.
    if not report.errors and all(fault.point != "closing" for fault, _ in fatal):
        yield f"{name}: noticed nothing"
    wanted = set(plan.ranks) - victims if name in victims else victims
    wanted |= {str(plan.ranks[other]) for other in wanted}
    if report.errors and not any(wanted & set(error.names) for error in report.errors):
        yield f"{name}: no error names a lost worker: {_shown(report)}"


_CHECKS: dict[str, Callable[[Plan, Outcome, str, Report], Iterator[str]]] = {
    SURVIVED: _clean,
    RAISED: _raised,
    TORN: _torn,
    LOST: _lost,
    WENT_ON: _lost,
}


def _limit_s(plan: Plan, outcome: Outcome, begin_s: float) -> float:
    """Returns how long after the first fatal fault all workers must have ended."""
    limit_s = MARGIN_S
    for fault, struck_s in _struck(plan, outcome):
        if fault.kind not in FATAL:
            limit_s += max(0.0, struck_s + fault.seconds - begin_s)
        elif fault.kind == PARTITION:
            limit_s += 1.1 * (plan.detection_s + plan.reconnect_s)
        elif fault.point in OF_JOINING:
            limit_s += INIT_LIMIT_S + _JOINING_GRACE_S
        elif plan.network == CUT:
            # The network's process still listens there, but does not speak.
            is_new = fault.point in OF_CONNECTING
            limit_s += knobs.CONNECT_TIMEOUT_S.default if is_new else plan.reconnect_s
    return limit_s


def _shown(report: Report) -> str:
    errors = [f"{each.type_name} {each.names}: {each.text}" for each in report.errors]
    return " | ".join(errors) or "none"
