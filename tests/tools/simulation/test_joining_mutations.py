"""Checks that the simulation of joining finds faults injected into its machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.test_joining_simulated import ClosedRun, OpenRun, Run
from tests.tools.simulation.failing import fails
from torchweft.engine.protocol import joining
from torchweft.engine.protocol.joining import Ask, Steps, Wait
from torchweft.engine.protocol.registration import Directory, Registration, Roster

SEEDS = 20_000
"""A fault must be found within this many runs."""

Fault = Callable[[pytest.MonkeyPatch], None]


def keeps_a_refusal_to_itself(patch: pytest.MonkeyPatch) -> None:
    """The leader does not write why there is no group."""
    lead = joining._lead

    def mutant(*arguments: Any) -> Steps[Directory]:
        steps = lead(*arguments)
        request = next(steps)
        while True:
            is_verdict = request[0] == "set" and request.key.startswith("directory/")
            is_refusal = is_verdict and b'"refusal": ""' not in request.values[0]
            answer = None if is_refusal else (yield request)
            try:
                request = steps.send(answer)
            except StopIteration as end:
                directory: Directory = end.value
                return directory

    patch.setattr(joining, "_lead", mutant)


def follows_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A worker waits for its leader without a limit."""

    def mutant(*_: Any, **__: Any) -> Steps[Directory]:
        yield Wait(joining.ROUND, 1e9)
        token = (yield Ask("get", joining.ROUND)).decode()
        yield Wait(joining.directory_key(token), 1e9)
        return Directory.decode((yield Ask("get", joining.directory_key(token))))

    patch.setattr(joining, "_follow", mutant)


def takes_rounds_that_are_over(patch: pytest.MonkeyPatch) -> None:
    """A worker takes the verdict of a former life for its own."""
    follow = joining._follow

    def mutant(*arguments: Any, **_: Any) -> Steps[Directory]:
        return follow(*arguments, is_kept=False)

    patch.setattr(joining, "_follow", mutant)


def leaves_workers_in_earlier_rounds(patch: pytest.MonkeyPatch) -> None:
    """The leader does not call workers that wait in an earlier round into its own."""

    def mutant(token: str, over: Any) -> Steps[None]:
        yield Ask("set", joining.ROUND, (token,))

    patch.setattr(joining, "_begin_round", mutant)


def introduces_itself_to_nobody(patch: pytest.MonkeyPatch) -> None:
    """A newcomer introduces itself to no earlier worker."""
    introduce = joining.introduce

    def mutant(admission: joining.Admission) -> Steps[None]:
        return introduce(admission._replace(earlier={}))

    patch.setattr(joining, "introduce", mutant)


def overlooks_the_last(patch: pytest.MonkeyPatch) -> None:
    """A newcomer overlooks the worker that came just before it."""
    introduce = joining.introduce

    def mutant(admission: joining.Admission) -> Steps[None]:
        earlier = dict(list(admission.earlier.items())[:-1])
        return introduce(admission._replace(earlier=earlier))

    patch.setattr(joining, "introduce", mutant)


def never_refuses(patch: pytest.MonkeyPatch) -> None:
    """A later worker takes the place of a living member."""

    def mutant(worker: int) -> Steps[bool]:
        yield joining.Ask("has", f"fate/{worker}")
        return False

    patch.setattr(joining, "_is_refused", mutant)


def admits_its_own_name(patch: pytest.MonkeyPatch) -> None:
    """A member admits newcomers of its own name."""
    arrival = Roster.arrival

    def mutant(roster: Roster[Any], registration: Registration) -> tuple[Any, tuple[Any, ...]]:
        try:
            return arrival(roster, registration)
        except joining.DuplicateName:
            return None, ()

    patch.setattr(Roster, "arrival", mutant)


FAULTS: list[tuple[Fault, type[Run]]] = [
    (keeps_a_refusal_to_itself, ClosedRun),
    (follows_for_ever, ClosedRun),
    (takes_rounds_that_are_over, ClosedRun),
    (leaves_workers_in_earlier_rounds, ClosedRun),
    (introduces_itself_to_nobody, OpenRun),
    (overlooks_the_last, OpenRun),
    (never_refuses, OpenRun),
    (admits_its_own_name, OpenRun),
]


@pytest.mark.parametrize(("fault", "kind"), FAULTS, ids=lambda each: each.__name__)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: Fault, kind: type[Run]) -> None:
    fault(monkeypatch)
    assert any(fails(kind(seed).run) for seed in range(SEEDS))
