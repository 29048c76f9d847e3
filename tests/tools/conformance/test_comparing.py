from __future__ import annotations

import pytest

from tests.contract.conformance.cases import CaseName, Outcome
from tests.contract.conformance.comparing import Comparison, compare, updated
from tests.contract.conformance.lists import Baseline, Expected
from tests.tools.conformance.results import case, verdict

ADD, SUB = case("test_add"), case("test_sub")
ON_PURPOSE = Expected("fail", 0.3, "unused-results", "asserts a hang")
CATEGORIES = {ADD: "portable", SUB: "CUDA"}


def differences(found: Comparison) -> set[str]:
    return {name for name, listed in vars(found).items() if listed}


@pytest.mark.parametrize(
    ("expected", "outcome", "where"),
    [
        (Expected("pass"), "pass", set()),
        (Expected("pass"), "fail", {"regressed"}),
        (Expected("pass"), "timeout", {"regressed"}),
        (Expected("pass"), "crash", {"regressed"}),
        (Expected("pass"), "skip", {"regressed"}),
        (ON_PURPOSE, "fail", {"on_purpose"}),
        (ON_PURPOSE, "skip", set()),
        (ON_PURPOSE, "pass", {"new"}),
        (Expected("skip"), "skip", set()),
        (Expected("skip"), "pass", {"new"}),
        (Expected("skip"), "fail", {"unlisted"}),
        (None, "pass", {"new"}),
        (None, "skip", set()),
        (None, "fail", {"unlisted"}),
    ],
)
def test_every_pair_of_expected_and_found(
    expected: Expected | None, outcome: Outcome, where: set[str]
) -> None:
    baseline = Baseline("2.13", {} if expected is None else {ADD: expected})
    found = compare(baseline, [verdict(ADD, outcome)], [ADD], CATEGORIES)
    assert differences(found) == where
    assert found.is_error == (where == {"regressed"})


@pytest.mark.parametrize(
    ("expected", "outcome", "where"),
    [
        (Expected("skip"), "skip", set()),
        (Expected("skip"), "pass", {"passed_on_gpu"}),
        (Expected("skip"), "fail", {"failed_on_gpu"}),
        (Expected("skip"), "timeout", {"failed_on_gpu"}),
        (Expected("pass"), "skip", set()),
        (Expected("pass"), "fail", {"regressed"}),
        (None, "pass", {"new"}),
    ],
)
def test_one_that_needs_a_gpu_may_be_skipped_and_may_pass(
    expected: Expected | None, outcome: Outcome, where: set[str]
) -> None:
    for name, categories in ((SUB, CATEGORIES), (CaseName("cuda", "Some", "test_new"), {})):
        baseline = Baseline("2.13", {} if expected is None else {name: expected})
        found = compare(baseline, [verdict(name, outcome)], [name], categories)
        assert differences(found) == where
        assert found.is_error == bool(where & {"regressed", "failed_on_gpu"})


def test_one_that_passes_some_of_the_times_is_no_pass() -> None:
    baseline = Baseline("2.13", {ADD: Expected("pass")})
    found = compare(baseline, [verdict(ADD, "pass", "fail", "pass")], [ADD], CATEGORIES)
    assert differences(found) == {"regressed", "unsteady"}
    found = compare(Baseline(), [verdict(ADD, "pass", "fail")], [ADD], CATEGORIES)
    assert differences(found) == {"unlisted", "unsteady"}


def test_listed_as_passing_and_gone_is_an_error() -> None:
    baseline = Baseline("2.13", {ADD: Expected("pass"), SUB: ON_PURPOSE})
    found = compare(baseline, [], [], CATEGORIES)
    assert found.missing == [ADD]
    assert found.is_error


def test_update_adds_passes_and_never_takes_one_away() -> None:
    third, fourth = case("test_mul"), case("test_div")
    before = Baseline("2.12", {ADD: Expected("pass", 9.0), SUB: ON_PURPOSE})
    verdicts = [
        verdict(ADD, "fail"),
        verdict(SUB, "pass"),
        verdict(third, "fail"),
        verdict(fourth, "skip"),
    ]
    after = updated(before, verdicts, [ADD, SUB, third, fourth], "2.13")
    assert after.torch == "2.13"
    assert after.tests == {
        ADD: Expected("pass", 9.0),
        SUB: Expected("pass", 0.5),
        fourth: Expected("skip", 0.5),
    }
