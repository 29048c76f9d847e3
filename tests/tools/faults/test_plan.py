from __future__ import annotations

import pytest

from tests.faults.plan import CUT, CYCLE, HOSTS, LAST_STEP, NAMES, TCP, draw

SEVERAL = range(10 * len(CYCLE))


def test_a_number_is_always_the_same_plan() -> None:
    assert [draw(number) for number in SEVERAL] == [draw(number) for number in SEVERAL]


def test_any_stretch_of_numbers_has_all_main_faults() -> None:
    first = 17
    plans = [draw(number) for number in range(first, first + len(CYCLE))]
    main = {(plan.faults[-1].kind, plan.faults[-1].point) for plan in plans}
    assert main == set(CYCLE)


def test_faults_are_possible_where_they_are_drawn() -> None:
    networks = {"cuts": CUT, "stall": CUT, "cable": HOSTS, "partition": HOSTS, "data": TCP}
    for plan in map(draw, SEVERAL):
        assert sorted(plan.ranks.values()) == [0, 1, 2, 3]
        assert plan.ranks[plan.leader] == 0
        for fault in plan.faults:
            assert networks.get(fault.kind, plan.network) == plan.network
            assert fault.victim in NAMES
            assert 1 <= fault.step <= LAST_STEP
            assert fault.point != "closing" or fault.victim == plan.leader


@pytest.mark.parametrize("number", [0, 1, 33])
def test_a_plan_says_what_happens(number: int) -> None:
    plan = draw(number)
    for fault in plan.faults:
        assert str(fault) in str(plan)
    assert f"rank 0: {plan.leader}" in str(plan)
