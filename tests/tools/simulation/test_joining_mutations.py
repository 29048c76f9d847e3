"""Checks that the simulation of joining finds faults injected into its machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.test_joining_simulated import ClosedRun, OpenRun, Run
from tests.tools.simulation.failing import fails
from torchweft.engine.protocol import joining
from torchweft.engine.protocol.joining import Ask, Introduce, Steps, Wait
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


def allows_two_of_one_name(patch: pytest.MonkeyPatch) -> None:
    """The leader does not check names."""
    assemble = joining.assemble

    def mutant(registrations: dict[int, Registration], *arguments: Any) -> Directory:
        renamed = {
            rank: dataclasses.replace(each, name=str(rank)) for rank, each in registrations.items()
        }
        directory = assemble(renamed, *arguments)
        workers = tuple(registrations[each.id] for each in directory.workers)
        return dataclasses.replace(directory, workers=workers)

    patch.setattr(joining, "assemble", mutant)


def trusts_every_directory(patch: pytest.MonkeyPatch) -> None:
    """A worker does not check that a directory is of its run."""
    patch.setattr(joining, "_check_directory", lambda *arguments: None)


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


def ends_with_its_store(patch: pytest.MonkeyPatch) -> None:
    """The leader, which hosts the store, does not wait until others have read the reason."""
    patch.setattr(joining, "READ_S", 0.0)


def gives_each_life_its_rank(patch: pytest.MonkeyPatch) -> None:
    """An id names all lives of a rank."""

    def mutant(me: Registration, own: str) -> Steps[Registration]:
        yield joining.Ask("peek", "ids")
        return me

    patch.setattr(joining, "_with_id", mutant)


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


def does_not_ask_namesakes(patch: pytest.MonkeyPatch) -> None:
    """A newcomer takes earlier workers with its name or rank for dead."""
    introduce = joining.introduce

    def mutant(admission: joining.Admission) -> Steps[None]:
        steps = introduce(admission)
        answer: Any = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration:
                return
            is_namesake = isinstance(request, Introduce) and request.is_namesake
            answer = [ConnectionRefusedError()] if is_namesake else (yield request)

    patch.setattr(joining, "introduce", mutant)


def takes_up_all_at_once(patch: pytest.MonkeyPatch) -> None:
    """A newcomer takes the last of several earlier workers with one name for the living one."""
    patch.setattr(joining, "_first_of_each_name", lambda others: (others, {}))


def never_refuses(patch: pytest.MonkeyPatch) -> None:
    """A later worker takes the place of a living member."""

    def mutant(worker: int) -> Steps[bool]:
        yield joining.Ask("has", f"fate/{worker}")
        return False

    patch.setattr(joining, "_is_refused", mutant)


def never_confirms(patch: pytest.MonkeyPatch) -> None:
    """A worker joins although others have refused it."""

    def mutant(place: int) -> Steps[None]:
        yield joining.Ask("has", f"fate/{place}")

    patch.setattr(joining, "_confirm", mutant)


def admits_its_own_name(patch: pytest.MonkeyPatch) -> None:
    """A member admits newcomers of its own name."""
    arrival = Roster.arrival

    def mutant(roster: Roster[Any], registration: Registration) -> tuple[Any, tuple[Any, ...]]:
        try:
            return arrival(roster, registration)
        except joining.DuplicateName:
            return None, ()

    patch.setattr(Roster, "arrival", mutant)


def prefers_the_store(patch: pytest.MonkeyPatch) -> None:
    """A registration from the store replaces a later life that has introduced itself."""
    patch.setattr(Roster, "is_replaced", lambda roster, registration: False)


FAULTS: list[tuple[Fault, type[Run]]] = [
    (keeps_a_refusal_to_itself, ClosedRun),
    (allows_two_of_one_name, ClosedRun),
    (trusts_every_directory, ClosedRun),
    (follows_for_ever, ClosedRun),
    (takes_rounds_that_are_over, ClosedRun),
    (leaves_workers_in_earlier_rounds, ClosedRun),
    (ends_with_its_store, ClosedRun),
    (gives_each_life_its_rank, OpenRun),
    (introduces_itself_to_nobody, OpenRun),
    (overlooks_the_last, OpenRun),
    (does_not_ask_namesakes, OpenRun),
    (takes_up_all_at_once, OpenRun),
    (never_refuses, OpenRun),
    (never_confirms, OpenRun),
    (admits_its_own_name, OpenRun),
    (prefers_the_store, OpenRun),
]


FIRST = {"prefers_the_store": 10_525}
"""Seeds that find a rare fault soon."""


@pytest.mark.parametrize(("fault", "kind"), FAULTS, ids=lambda each: each.__name__)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: Fault, kind: type[Run]) -> None:
    fault(monkeypatch)
    first = FIRST.get(fault.__name__, 0)
    assert any(fails(kind(seed).run) for seed in (first, *range(SEEDS)))
