from __future__ import annotations

import pytest

from benchmarks.frame.figures import Round, Rounds
from benchmarks.tensors import sizes
from benchmarks.tensors.payloads import MEASURED, POWERS
from benchmarks.tensors.question import ONE_HOST


def rounds_of(**times_of: dict[int, float]) -> Rounds:
    names = {each.size_bytes: each.name for each in POWERS}
    return {
        (side, f"{ONE_HOST.title}: {names[size]}"): [Round([seconds])]
        for side, times in times_of.items()
        for size, seconds in times.items()
    }


def test_every_size_has_a_name_of_its_own() -> None:
    assert len({each.name for each in MEASURED}) == len(MEASURED)
    assert [sizes.size_text(size) for size in (8, 1 << 16, 1 << 30)] == ["8 B", "64 KiB", "1 GiB"]


def test_steps_are_those_between_doubled_sizes() -> None:
    assert sizes.steps_of({8: 1.0, 16: 3.0, 64: 3.0, 128: 3.0}) == {16: 3.0, 128: 1.0}


@pytest.mark.parametrize(
    ("limit", "mark"), [({8: 1.0, 16: 1.0}, "missed"), ({8: 1.0, 16: 4.0}, "met")]
)
def test_a_step_that_the_limit_has_as_well_is_no_cliff(limit: dict[int, float], mark: str) -> None:
    rounds = rounds_of(weft={8: 1.0, 16: 3.0}, copy=limit)
    assert sizes._verdict(ONE_HOST, rounds).startswith(f"- {mark}")


def test_the_table_has_a_line_for_each_size_and_the_ratio_to_torch() -> None:
    rounds = rounds_of(weft={8: 2e-5, 16: 2e-5}, torch={8: 1e-4, 16: 1e-4})
    assert sizes._table(ONE_HOST, rounds)[2:] == [
        "| 8 B | 20 | 100 | 5x |",
        "| 16 B | 20 | 100 | 5x |",
    ]
