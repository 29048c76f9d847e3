"""Checks that the simulation of calls finds faults injected into the machines."""

from __future__ import annotations

import math
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


class KeepsCancellationsToItself(CallClient[Asked]):
    """Does not tell callees that no caller waits any more."""

    def _end(self, *arguments: Any, is_told: bool = True) -> Actions:
        return super()._end(*arguments, is_told=False)


class TellsOfUnsentCalls(CallClient[Asked]):
    """Tells callees to cancel calls that they were never sent."""

    def keep(self, call: Asked) -> int:
        number = super().keep(call)
        del self._unsent[number]
        return number

    def sending(self, call: Asked) -> None:
        pass


class SendsEndedCalls(CallClient[Asked]):
    """Sends a call that has ended while it waited for the connection."""

    def sending(self, call: Asked) -> None:
        self._unsent.pop(call.number, None)


class LooksOnce(CallClient[Asked]):
    """Does not check the call again after the request was written."""

    def opened(self, call: Asked, *, loss: Loss = None, **how: bool) -> Actions:
        super().opened(call, was_sent=False, loss=loss)
        return []


class TellsOnce(CallClient[Asked]):
    """Checks the call again, but does not tell the callee again."""

    def opened(self, call: Asked, *, loss: Loss = None, **how: bool) -> Actions:
        actions = super().opened(call, loss=loss, **how)
        return actions if len(actions) > 1 else []


class OverlooksALoss(CallClient[Asked]):
    """Does not check, after the request was written, whether the callee was lost before."""

    def opened(self, call: Asked, *, loss: Loss = None, **how: bool) -> Actions:
        return super().opened(call, loss=None, **how)


class IsImpatient(CallClient[Asked]):
    """Ends calls before their time is up."""

    def expire(self, now_s: float) -> tuple[Actions, float]:
        return super().expire(now_s + 0.1)


class ForgetsTheNextDeadline(CallClient[Asked]):
    """Does not say when to check for late calls next."""

    def expire(self, now_s: float) -> tuple[Actions, float]:
        return super().expire(now_s)[0], math.inf


class LetsNestedCallsGoOn(CallClient[Asked]):
    """Does not end nested calls with their parents."""

    def parents_cancelled(self, parents: Set[ServedCall]) -> Actions:
        return []


class WaitsForTheLost(CallClient[Asked]):
    """Does not end the calls to a lost worker."""

    def worker_lost(self, worker: int, make_error: Callable[[], BaseException]) -> Actions:
        return []


class EndsCallsToOthers(CallClient[Asked]):
    """Ends all calls when one worker is lost."""

    def worker_lost(self, worker: int, make_error: Callable[[], BaseException]) -> Actions:
        return self._end(self.take_where(lambda _: True), lambda _, __: make_error(), is_told=False)


class BlamesTheCallee(CallClient[Asked]):
    """Says that the callee may still run calls that were not sent."""

    def _end(
        self, calls: list[Asked], make_error: Callable[[Asked, bool], BaseException], **how: bool
    ) -> Actions:
        return super()._end(calls, lambda call, _: make_error(call, True), **how)


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


class SendsNoKeptCalls(KeptCall[Asked]):
    """Drops the calls that wait for a connection, as if they had ended."""

    def is_wanted(self) -> bool:
        return False


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


class BeginsLateCalls(Served):
    """Runs calls whose time was up in their queue."""

    def begins(self, creation: int, remaining_s: float, now_s: float) -> bool:
        return super().begins(creation, remaining_s, min(now_s, self.arrived_s))


class ForgetsDeadlines(Served):
    """Forgets how long its caller waits, once it runs."""

    def begins(self, *arguments: Any) -> bool:
        is_run = super().begins(*arguments)
        self.deadline_s = math.inf
        return is_run


class GoesOnForNobody(Served):
    """Runs calls that have waited for a value when no caller waits any more."""

    def goes_on(self, error: BaseException | None, now_s: float) -> bool:
        if error is None:
            return True
        return super().goes_on(error, now_s)


class AnswersCancelledCalls(Served):
    """Answers calls for which no caller waits."""

    def __call__(self, result: Any, error: BaseException | None) -> None:
        self.was_cancelled = False
        super().__call__(result, error)


class AnswersTwice(Served):
    """Answers a failed call twice."""

    def __call__(self, result: Any, error: BaseException | None) -> None:
        super().__call__(result, error)
        if error is not None and not self.was_cancelled and not self.peer.lost and self.number:
            self.worker.reply_error(self.peer, self.number, error)


class StaysInItsTable(Served):
    """Stays in the caller's table of served calls after its end."""

    def __call__(self, result: Any, error: BaseException | None) -> None:
        super().__call__(result, error)
        if self.number:
            self.peer.served[self.number] = self


class SwallowsRefusals(Served):
    """Does not report that a call was refused, so that the caller keeps waiting."""

    def refuse(self, *arguments: Any) -> None:
        self.end()


class StaysUnfinished(Served):
    """Keeps a call whose value is made among those that are being made."""

    def __call__(self, result: Any, error: BaseException | None) -> None:
        is_creation = self.owned is not None
        super().__call__(result, error)
        if is_creation:
            self.worker.unfinished.add(self)


class ServesTheLost(CallServer):
    """Does not cancel the calls of a lost worker."""

    def caller_lost(self, caller: Any) -> bool:
        return False


class MakesValuesForTheLost(CallServer):
    """Does not cancel the creations of a lost worker."""

    def creations_lost(self, making: Any, caller: Any) -> bool:
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


def nest_unseen(parent: Any, name: str, what: Any, limit_s: float, now_s: float) -> Any:
    """Does not note that a call has made a nested call."""
    had_nested = parent.has_nested
    nested = nest(parent, name, what, limit_s, now_s)
    parent.has_nested = had_nested
    return nested


def owes_nothing(callers: Iterable[Any]) -> bool:
    """Lets a worker leave while callers of its coroutines wait."""
    return False


MUTANTS: dict[str, list[Any]] = {
    "CallClient": [
        AnswersEndNothing,
        KeepsCancellationsToItself,
        TellsOfUnsentCalls,
        SendsEndedCalls,
        LooksOnce,
        TellsOnce,
        OverlooksALoss,
        IsImpatient,
        ForgetsTheNextDeadline,
        LetsNestedCallsGoOn,
        WaitsForTheLost,
        EndsCallsToOthers,
        BlamesTheCallee,
        CancelsTheWrongCalls,
    ],
    "KeptCall": [LeavesRequestsKept, SendsNoKeptCalls],
    "Served": [
        RunsTwice,
        BeginsCancelledCalls,
        BeginsLateCalls,
        ForgetsDeadlines,
        GoesOnForNobody,
        AnswersCancelledCalls,
        AnswersTwice,
        StaysInItsTable,
        SwallowsRefusals,
        StaysUnfinished,
    ],
    "CallServer": [
        ServesTheLost,
        MakesValuesForTheLost,
        TakesValuesFromOthers,
        ForgetsWhatIsNested,
    ],
    "nest": [nest_without_limit, nest_for_nobody, nest_unseen],
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
