"""Checks that the simulation of connections finds faults injected into ``Connecting``.

In ``make check``, ``test_connecting_simulated`` tries the same programs with at least the same
seeds, unmutated.
"""

from __future__ import annotations

import pytest

from tests.simulation.connections import Node
from tests.simulation.test_connecting_simulated import PROGRAMS, SEED_COUNT, Run
from tests.thorough import CHECKED, share
from tests.tools.simulation.failing import fails
from torchweft.engine.protocol.connecting import (
    Answer,
    Connecting,
    Failure,
    Hello,
    Probe,
    Purpose,
    Resume,
    Step,
    Verdict,
)

SEEDS = 60
"""A fault must be found within this many runs of each program."""
assert share(SEED_COUNT, of=CHECKED) >= SEEDS


class AcceptsWhileItsOfferStands(Connecting):
    """Accepts the other side's connection although its own may have been accepted."""

    def hello(self, me: int, said: Hello) -> Answer:
        return super().hello(-1, said)


class NeverGivesWay(Connecting):
    """Refuses the other side whenever it dials itself, whichever id is the higher one."""

    def hello(self, me: int, said: Hello) -> Answer:
        return super().hello(1 << 60, said)


class GivesUpTheBusy(Connecting):
    """Treats a peer that accepts connections and does not speak as one that is gone."""

    def dial_failed(self, now_s: float, failure: Failure, cause: str) -> Step:
        failure = Failure.REFUSED if failure is Failure.BUSY else failure
        return super().dial_failed(now_s, failure, cause)


class WaitsForTheGone(Connecting):
    """Treats a refused connection as a fault of the network."""

    def dial_failed(self, now_s: float, failure: Failure, cause: str) -> Step:
        failure = Failure.BROKEN if failure is Failure.REFUSED else failure
        return super().dial_failed(now_s, failure, cause)


class BothResume(Connecting):
    """Resumes a session whichever side has dialled it."""

    def redial(self, now_s: float, timeout_s: float) -> Resume | Probe | None:
        asked = super().redial(now_s, timeout_s)
        return Resume(asked.limit_s) if isinstance(asked, Probe) else asked


class KnowsNoOffer(Connecting):
    """Denies the session if its own offer was accepted without its knowledge."""

    def hello(self, me: int, said: Hello) -> Answer:
        if said.purpose is Purpose.PROBE and not self._is_linked:
            return Answer(Verdict.REFUSE, "there is no such session")
        return super().hello(me, said)


class LosesAgain(Connecting):
    """Declares a worker lost for each cause, not only for the first."""

    def lose(self, cause: str) -> str | None:
        return super().lose(cause) or cause


class IgnoresFarewells(Connecting):
    """Redials a worker that has said that it leaves."""

    def goodbye(self, reason: bytes) -> None:
        pass


class TakesCrossedForANo(Connecting):
    """Gives up a peer that answers that it dials itself."""

    def dial_failed(self, now_s: float, failure: Failure, cause: str) -> Step:
        failure = Failure.REFUSED if failure is Failure.CROSSED else failure
        return super().dial_failed(now_s, failure, cause)


MUTANTS = {
    AcceptsWhileItsOfferStands: 5,
    NeverGivesWay: 0,
    GivesUpTheBusy: 0,
    WaitsForTheGone: 6,
    BothResume: 3,
    KnowsNoOffer: 5,
    LosesAgain: 3,
    IgnoresFarewells: 6,
    TakesCrossedForANo: 0,
}
"""Each with a seed that finds it soon; it counts as missed once all seeds have been tried."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, mutant: type[Connecting]) -> None:
    monkeypatch.setattr(Node, "machine_type", mutant)
    seeds = [MUTANTS[mutant], *range(SEEDS)]
    assert any(fails(program, Run(seed)) for seed in seeds for program in PROGRAMS)
