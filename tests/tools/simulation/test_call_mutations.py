"""Checks that the simulation of calls finds faults injected into the machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any

import pytest

from tests.simulation.call_worker import Asked, Served
from tests.simulation.test_calls_simulated import PROGRAMS, Run
from tests.tools.simulation.failing import fails
from torchweft.engine.protocol.calls import (
    Action,
    CallClient,
    CallServer,
    KeptCall,
    ServedCall,
    TellCancelled,
    nest,
)
from torchweft.engine.wire.frames import Frame

SEEDS = 60
"""A fault must be found within this many runs of each program."""

Actions = list[Action[Asked]]
Loss = Callable[[], BaseException] | None


class AnswersEndNothing(CallClient[Asked]):
    """Leaves an answered call in the table, so that it ends again."""

    def answered(self, worker: int, frame: Frame) -> Asked | None:
        return self.entries.get(frame.id)


class SendsEndedCalls(CallClient[Asked]):
    """Sends a call that has ended while it waited for the connection."""

    def sending(self, call: Asked) -> None:
        self._unsent.pop(call.number, None)


class OverlooksALoss(CallClient[Asked]):
    """Does not check, after the request was written, whether the callee was lost before."""

    def opened(self, call: Asked, *, loss: Loss = None, **how: bool) -> Actions:
        return super().opened(call, loss=None, **how)


class IsImpatient(CallClient[Asked]):
    """Ends calls before their time is up."""

    def expire(self, now_s: float) -> tuple[Actions, float]:
        return super().expire(now_s + 0.1)


class LetsNestedCallsGoOn(CallClient[Asked]):
    """Does not end nested calls with their parents."""

    def parents_cancelled(self, parents: Set[ServedCall]) -> Actions:
        return []


class WaitsForTheLost(CallClient[Asked]):
    """Does not end the calls to a lost worker."""

    def worker_lost(self, worker: int, make_error: Callable[[], BaseException]) -> Actions:
        return []


class CancelsTheWrongCalls(CallClient[Asked]):
    """Tells one worker the cancelled calls to another one."""

    def _end(self, *arguments: Any, **how: bool) -> Actions:
        actions = super()._end(*arguments, **how)
        told = [action for action in actions if isinstance(action, TellCancelled)]
        others = [action for action in actions if action not in told]
        return [*others, *(TellCancelled(told[0].worker, each.numbers) for each in told)]


class LeavesRequestsKept(KeptCall[Asked]):
    """Does not take requests back that are not sent."""

    def drop(self, error: Exception | None) -> None:
        pass


class RunsTwice(Served):
    """Treats a call with an open number as a new call."""

    def __init__(self, worker: Any, peer: Any, *arguments: Any) -> None:
        known = peer.served.copy()
        peer.served.clear()
        super().__init__(worker, peer, *arguments)
        peer.served.update(known)


class BeginsCancelledCalls(Served):
    """Runs calls that were cancelled in their queue."""

    def begins(self, *arguments: Any) -> bool:
        was_cancelled, self.was_cancelled = self.was_cancelled, False
        is_run = super().begins(*arguments)
        self.was_cancelled = was_cancelled
        return is_run


class AnswersTwice(Served):
    """Answers a failed call twice."""

    def __call__(self, result: Any, error: BaseException | None) -> None:
        super().__call__(result, error)
        if error is not None and not self.was_cancelled and not self.peer.lost and self.number:
            self.worker.reply_error(self.peer, self.number, error)


class SwallowsRefusals(Served):
    """Does not report that a call was refused, so that the caller keeps waiting."""

    def refuse(self, *arguments: Any) -> None:
        self.end()


class ServesTheLost(CallServer):
    """Does not cancel the calls of a lost worker."""

    def caller_lost(self, caller: Any) -> bool:
        return False


class TakesValuesFromOthers(CallServer):
    """Cancels creations whose values other workers refer to."""

    def creations_lost(self, making: Any, caller: Any) -> bool:
        return self.cancel(call for call in making if call.peer is caller)


class ForgetsWhatIsNested(CallServer):
    """Cancels calls, but not their nested calls."""

    def cancel(self, calls: Iterable[ServedCall]) -> bool:
        super().cancel(calls)
        return False


def nest_without_limit(parent: Any, name: str, what: Any, limit_s: float, now_s: float) -> Any:
    """Lets nested calls take longer than their parents may."""
    return nest(parent, name, what, limit_s, now_s)[0], limit_s


def nest_for_nobody(parent: Any, name: str, what: Any, limit_s: float, now_s: float) -> Any:
    """Makes nested calls for parents that were cancelled."""
    parent.has_nested = True
    return parent, min(limit_s, max(parent.deadline_s - now_s, 0.0))


def owes_nothing(callers: Iterable[Any]) -> bool:
    """Lets a worker leave while callers of its coroutines wait."""
    return False


MUTANTS: dict[str, list[Any]] = {
    "CallClient": [
        AnswersEndNothing,
        SendsEndedCalls,
        OverlooksALoss,
        IsImpatient,
        LetsNestedCallsGoOn,
        WaitsForTheLost,
        CancelsTheWrongCalls,
    ],
    "KeptCall": [LeavesRequestsKept],
    "Served": [
        RunsTwice,
        BeginsCancelledCalls,
        AnswersTwice,
        SwallowsRefusals,
    ],
    "CallServer": [
        ServesTheLost,
        TakesValuesFromOthers,
        ForgetsWhatIsNested,
    ],
    "nest": [nest_without_limit, nest_for_nobody],
    "has_awaited": [owes_nothing],
}
"""Mutants, by the name in ``call_worker`` that they replace."""


@pytest.mark.parametrize(
    ("name", "mutant"),
    [(name, mutant) for name, mutants in MUTANTS.items() for mutant in mutants],
)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, name: str, mutant: Any) -> None:
    monkeypatch.setattr(f"tests.simulation.call_worker.{name}", mutant)
    assert any(
        fails(program, Run(seed, has_strange=PROGRAMS[program]))
        for seed in range(SEEDS)
        for program in PROGRAMS
    )
