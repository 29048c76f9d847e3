from __future__ import annotations

from tests.faults.plan import CYCLE, draw

SEVERAL = range(10 * len(CYCLE))


def test_a_number_is_always_the_same_plan() -> None:
    assert [draw(number) for number in SEVERAL] == [draw(number) for number in SEVERAL]
