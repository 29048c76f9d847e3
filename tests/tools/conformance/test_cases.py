from __future__ import annotations

import pytest

from tests.contract.conformance.cases import CaseName, Outcome, Result, select, verdicts_of
from tests.tools.conformance.results import NOWHERE, case, verdict


def test_name_is_written_and_read() -> None:
    assert str(case("test_add")) == "tp.RpcTest.test_add"
    assert CaseName.parse("tp.RpcTest.test_add") == case("test_add")


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'test_add' is no test; one is written suite\.Class"):
        CaseName.parse("test_add")


@pytest.mark.parametrize(
    ("outcomes", "outcome", "is_steady"),
    [
        (["pass", "pass"], "pass", True),
        (["pass", "fail"], "fail", False),
        (["skip", "crash"], "fail", True),
        (["pass", "skip"], "skip", False),
        (["timeout"], "fail", True),
        (["skip"], "skip", True),
    ],
)
def test_verdict_is_that_of_the_worst_run(
    outcomes: list[Outcome], outcome: str, is_steady: bool
) -> None:
    made = verdict(case("test_add"), *outcomes)
    assert made.outcome == outcome
    assert made.is_steady == is_steady
    assert made.passes == outcomes.count("pass")


def test_runs_of_a_test_become_one_verdict() -> None:
    runs = [
        Result(case(test), outcome, seconds, NOWHERE)
        for test, outcome, seconds in [
            ("test_b", "pass", 1.0),
            ("test_a", "pass", 1.0),
            ("test_b", "fail", 3.0),
        ]
    ]
    first, second = verdicts_of(runs)
    assert (first.case.test, first.outcome, first.passes) == ("test_a", "pass", 1)
    assert (second.case.test, second.outcome, second.passes) == ("test_b", "fail", 1)
    assert second.seconds == 3.0


def test_any_of_the_patterns_selects() -> None:
    cases = [case("test_add"), case("test_sub"), case("test_add", suite="faulty")]
    assert select(cases, []) == cases
    assert select(cases, ["tp.RpcTest.test_a"]) == [cases[0]]
    assert select(cases, ["sub", "faulty."]) == cases[1:]
    assert select(cases, ["nothing"]) == []
