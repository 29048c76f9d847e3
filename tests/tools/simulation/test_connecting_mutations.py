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
    CROSSED,
    Action,
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


class RenamesItsOffer(Connecting):
    """Gives each caller's offer a name of its own."""

    def want(self, now_s: float, deadline_s: float, timeout_s: float, name: str) -> Step:
        self._offer = None
        return super().want(now_s, deadline_s, timeout_s, name)


class TurnsTheDiallerAway(Connecting):
    """Does not recognize the offer that it has accepted."""

    def hello(self, me: int, said: Hello) -> Answer:
        answer = super().hello(me, said)
        is_again = answer.verdict is Verdict.WELCOME_AGAIN
        return Answer(Verdict.REFUSE, "there is a connection") if is_again else answer


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


class WaitsForTheGoneInASession(Connecting):
    """Does the same for the connection of a session."""

    def redial_failed(self, now_s: float, failure: Failure, cause: str) -> list[Action]:
        failure = Failure.BROKEN if failure is Failure.REFUSED else failure
        return super().redial_failed(now_s, failure, cause)


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


class ForgetsWhoAccepts(Connecting):
    """Takes no notice that the peer's system accepts connections."""

    def reached(self, now_s: float) -> None:
        pass


class LetsItsOfferLie(Connecting):
    """Does not repeat an offer when it hears that the answer to it was lost."""

    def hello(self, me: int, said: Hello) -> Answer:
        return super().hello(me, said)._replace(must_dial=False)


class LosesAgain(Connecting):
    """Declares a worker lost for each cause, not only for the first."""

    def lose(self, cause: str) -> str | None:
        return super().lose(cause) or cause


class IgnoresFarewells(Connecting):
    """Redials a worker that has said that it leaves."""

    def goodbye(self, reason: bytes) -> None:
        pass


class OffersBesideAnAccept(Connecting):
    """Sends ``HELLO`` although the other side's connection is being accepted."""

    def offer(self) -> bool:
        self._is_offered = True
        return not self._is_linked and self.cause is None


class TakesCrossedForANo(Connecting):
    """Gives up a peer that answers that it dials itself."""

    def dial_failed(self, now_s: float, failure: Failure, cause: str) -> Step:
        failure = Failure.REFUSED if failure is Failure.CROSSED else failure
        return super().dial_failed(now_s, failure, cause)


class CrossesEverything(Connecting):
    """Refuses the other side before it has made an offer itself."""

    def _answer_offer(self, me: int, said: Hello) -> Answer:
        if self._first is not None and not self._is_linked and me > self.peer:
            return Answer(Verdict.REFUSE, CROSSED)
        return super()._answer_offer(me, said)


MUTANTS = {
    AcceptsWhileItsOfferStands: 5,
    NeverGivesWay: 0,
    RenamesItsOffer: 5,
    TurnsTheDiallerAway: 5,
    GivesUpTheBusy: 0,
    WaitsForTheGone: 6,
    WaitsForTheGoneInASession: 3,
    BothResume: 3,
    KnowsNoOffer: 5,
    ForgetsWhoAccepts: 1158,
    LetsItsOfferLie: 232,
    LosesAgain: 3,
    IgnoresFarewells: 6,
    OffersBesideAnAccept: 14,
    TakesCrossedForANo: 0,
    CrossesEverything: 8,
}
"""Each with a seed that finds it soon; it counts as missed once all seeds have been tried."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, mutant: type[Connecting]) -> None:
    monkeypatch.setattr(Node, "machine_type", mutant)
    seeds = [MUTANTS[mutant], *range(SEEDS)]
    assert any(fails(program, Run(seed)) for seed in seeds for program in PROGRAMS)
