from __future__ import annotations

import pytest

from tests.matrix import (
    CI_TORCH,
    NEWEST_TORCH,
    OLDEST_TORCH,
    Row,
    counts_in,
    failures_in,
    find_python,
    rows_for,
)


def test_every_python_meets_the_newest_torch_and_each_torch_some_python() -> None:
    rows = rows_for(["3.10", "3.13"], "3.11")
    assert {row.python for row in rows if row.torch == NEWEST_TORCH} == {"3.10", "3.13"}
    assert Row("3.10", OLDEST_TORCH) in rows
    assert Row("3.11", CI_TORCH) in rows
    assert len({row.folder for row in rows} | {row.log for row in rows}) == 2 * len(rows)


@pytest.mark.parametrize(
    ("output", "counts"),
    [
        (
            "...\n==== 3 failed, 12 passed, 1 skipped in 4.05s ====\n",
            "3 failed, 12 passed, 1 skipped",
        ),
        ("= 1 passed in 0.1s =\n== 20 passed in 61.00s (0:01:01) ==\n", "20 passed"),
        ("ERROR: no such torch", "no test ran"),
    ],
)
def test_the_last_counts_of_pytest_are_told(output: str, counts: str) -> None:
    assert counts_in(output) == counts


def test_failures_are_told_with_their_reasons() -> None:
    failed = "FAILED tests/unit/test_x.py::test_y[FAILED tests] - assert 1 == 2"
    ended = "ERROR tests/unit/test_z.py - ImportError"
    output = f"...\n== short test summary info ==\n{failed}\n{ended}\nERROR: no such torch\n"
    assert failures_in(output) == [failed, ended]
    assert failures_in("12 passed in 4.05s") == []


def test_a_python_that_is_not_there_is_not_found() -> None:
    assert find_python("2.99") is None
