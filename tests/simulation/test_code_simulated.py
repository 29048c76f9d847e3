"""Functions by value: no call names code that its callee lacks, whoever overtakes whom."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from tests.simulation.code_world import Callee, Caller, CodeWorld
from tests.simulation.seeds import batches, name_of, try_seeds
from torchweft.protocol.kept_code import Offer, SentCodes

STEPS = 400
SEEDS = 60
"""A fault must be found within this many runs."""


@pytest.mark.parametrize("batch", batches(500), ids=name_of)
def test_no_call_lacks_its_code(batch: range) -> None:
    try_seeds(batch, CodeWorld, lambda world: world.run(STEPS), lambda world: world.trace)


def test_the_simulation_goes_everywhere() -> None:
    worlds = [CodeWorld(seed) for seed in range(20)]
    for world in worlds:
        world.run(STEPS)
    assert sum(world.caller.whole for world in worlds) > 100  # No room, too large, or contention.
    assert sum(world.caller.by_number for world in worlds) > 200
    assert sum(world.caller.codes_sent for world in worlds) > 200
    assert sum("interrupt" in world.trace for world in worlds) > 5
    assert sum("lost" in world.trace for world in worlds) > 2


class PublishesFirst(Caller):
    """Lets other threads use a number before the code is sent."""

    publishes_first = True


class NeverPublishes(Caller):
    """Does not say that the code was sent."""

    reports_sent = False


class _Heedless(SentCodes):
    def offer(self, size_bytes: int) -> Offer | None:
        while self._table and len(self._sizes) >= self._limit:
            _, entry = self._table.popitem(last=False)
            self._unused.append(entry.number)
        return super().offer(size_bytes)


class ForgetsWhatIsInUse(Caller):
    """Has the callee forget code whose number a request still holds."""

    table_type = _Heedless


class _Reusing(SentCodes):
    def __init__(self, limit: int, limit_bytes: int) -> None:
        super().__init__(limit, limit_bytes)
        self._numbers = itertools.cycle(range(1, limit + 1))  # type: ignore[assignment]


class ReusesNumbers(Caller):
    """Gives one number to one code after another."""

    table_type = _Reusing


class _Forgetful(SentCodes):
    def offer(self, size_bytes: int) -> Offer | None:
        offer = super().offer(size_bytes)
        self._forgotten.clear()
        return offer


class SaysOnlyOnceWhatIsForgotten(Caller):
    """Does not repeat the numbers of a message that was not sent."""

    table_type = _Forgetful


class _Leaking(SentCodes):
    def _collect(self) -> None:
        self._forgotten += self._unused
        self._unused.clear()


class CountsForgottenCode(Caller):
    """Never makes room."""

    table_type = _Leaking


class _Boundless(SentCodes):
    def __init__(self, limit: int, limit_bytes: int) -> None:
        super().__init__(limit + 1, limit_bytes)


class KeepsOneTooMany(Caller):
    """Sends more than the callee keeps."""

    table_type = _Boundless


class ResolvesLate(Callee):
    """Looks numbers up when a call is handled, not when it is read."""

    resolves_when_read = False


def runs(caller: type[Caller], callee: type[Callee]) -> Iterable[BaseException | None]:
    for seed in range(SEEDS):
        try:
            CodeWorld(seed, caller, callee).run(STEPS)
            yield None
        except Exception as error:
            yield error


@pytest.mark.parametrize(
    "fault",
    [
        PublishesFirst,
        NeverPublishes,
        ForgetsWhatIsInUse,
        ReusesNumbers,
        SaysOnlyOnceWhatIsForgotten,
        CountsForgottenCode,
        KeepsOneTooMany,
        ResolvesLate,
    ],
)
def test_faults_are_found(fault: type[Caller] | type[Callee]) -> None:
    caller = fault if issubclass(fault, Caller) else Caller
    callee = fault if issubclass(fault, Callee) else Callee
    assert any(error is not None for error in runs(caller, callee))
