"""Checks that the simulation of floods finds faults injected into ``Strangers``.

In ``make check``, ``test_strangers_simulated`` tries the same programs with at least the same
seeds, unmutated.
"""

from __future__ import annotations

import pytest

from tests.simulation.flood_world import Connection, Flood
from tests.simulation.test_strangers_simulated import PROGRAMS, SEED_COUNT
from tests.thorough import CHECKED, share
from tests.tools.simulation.failing import fails
from torchweft.engine.protocol.strangers import Strangers

SEEDS = 12
"""A fault must be found within this many runs of each program."""
assert share(SEED_COUNT, of=CHECKED) >= SEEDS

Machine = Strangers[Connection]


class KnowsNoVouchers(Machine):
    """Treats all connections alike: the oldest goes, whose it may be."""

    def _brings_voucher(self, connection: Connection) -> bool:
        return False


class TakesCopies(Machine):
    """Lets a voucher count again."""

    def _brings_voucher(self, connection: Connection) -> bool:
        self._numbers.clear()
        return super()._brings_voucher(connection)


class HasNoLimitForMembers(Machine):
    """Lets a voucher count however many members are there; copies count as well."""

    def _brings_voucher(self, connection: Connection) -> bool:
        return self._look(connection) is not None


class ForgetsThreads(Machine):
    """Takes the thread of a connection for free as soon as the connection is told to go."""

    def _let_go(self, connection: Connection) -> tuple[object, Connection]:  # type: ignore[override]
        told = super()._let_go(connection)
        self._served.discard(connection)
        return told


MUTANTS: list[type[Machine]] = [
    KnowsNoVouchers,
    TakesCopies,
    HasNoLimitForMembers,
    ForgetsThreads,
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, mutant: type[Machine]) -> None:
    monkeypatch.setattr(Flood, "machine_type", mutant)
    assert any(fails(program, seed) for seed in range(SEEDS) for program in PROGRAMS)
