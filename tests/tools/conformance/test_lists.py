from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.contract.conformance.lists import Baseline, Expected, read_categories, read_sample
from tests.tools.conformance.results import case


def test_list_is_written_and_read(tmp_path: Path) -> None:
    tests = {
        case("test_sub"): Expected("fail", 0.3, "unused-results", 'asserts a hang, "on purpose"'),
        case("test_add"): Expected("pass", 0.5),
    }
    path = tmp_path / "expected.csv"
    Baseline("2.13.0", tests).write(path)
    assert path.read_text().splitlines()[0] == "# recorded with torch 2.13.0"
    assert path.read_text().splitlines()[2] == "tp,RpcTest,test_add,pass,0.5,,"
    assert Baseline.read(path) == Baseline("2.13.0", tests)


def test_an_outcome_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "expected.csv"
    Baseline("2.13.0", {case("test_add"): Expected("pass")}).write(path)
    path.write_text(path.read_text().replace(",pass,", ",passes,"))
    with pytest.raises(ValueError, match="expected must be pass, fail or skip, not 'passes'"):
        Baseline.read(path)


def test_every_expected_failure_says_why() -> None:
    silent = [
        str(name)
        for name, expected in Baseline.read().tests.items()
        if expected.outcome == "fail" and not (expected.difference and expected.reason)
    ]
    assert not silent, "these need the difference and the reason for which they fail"


def test_every_listed_test_has_a_category() -> None:
    assert not set(Baseline.read().tests) - set(read_categories())


def test_sample_is_of_every_class_that_passes_something() -> None:
    passing = {name for name, what in Baseline.read().tests.items() if what.outcome == "pass"}
    sample = read_sample()
    assert len(sample) >= 80
    assert not [name for name, count in Counter(sample).items() if count > 1]
    assert not set(sample) - passing, "the sample is of tests that are listed as passing"
    missing = {name[:2] for name in passing} - {name[:2] for name in sample}
    assert not missing, "the sample has no test of these classes"
