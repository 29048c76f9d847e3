from __future__ import annotations

from tests.contract.conformance.lists import Baseline, read_categories


def test_every_expected_failure_says_why() -> None:
    silent = [
        str(name)
        for name, expected in Baseline.read().tests.items()
        if expected.outcome == "fail" and not (expected.difference and expected.reason)
    ]
    assert not silent, "these need the difference and the reason for which they fail"


def test_every_listed_test_has_a_category() -> None:
    assert not set(Baseline.read().tests) - set(read_categories())
