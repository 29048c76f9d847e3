"""Compares a run with the committed list, and adds new results to the list."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.contract.conformance.cases import CaseName, Verdict, select
from tests.contract.conformance.lists import Baseline, Expected

_NEEDS_GPU = "CUDA"
"""The category of tests that may be skipped on one machine and pass on another."""


def needs_gpu(case: CaseName, categories: Mapping[CaseName, str]) -> bool:
    """Returns whether a test is skipped on a machine without a GPU."""
    return categories.get(case, "") == _NEEDS_GPU or case.suite == "cuda"


@dataclass(frozen=True)
class Comparison:
    """How a run differs from the committed list.

    Attributes:
        regressed: Listed as passing, but did not pass every time.
        missing: Listed as passing, but not among the tests of this torch.
        on_purpose: Listed as failing, and failed.
        unlisted: Failed, and the list does not say why.
        new: Passed every time, and is not listed as passing.
        unsteady: Passed only some of the times.
        passed_on_gpu: Passed every time, and is listed as skipped: the list is of a machine without
            a GPU.
        failed_on_gpu: The same, but failed.
    """

    regressed: list[Verdict] = field(default_factory=list)
    missing: list[CaseName] = field(default_factory=list)
    on_purpose: list[Verdict] = field(default_factory=list)
    unlisted: list[Verdict] = field(default_factory=list)
    new: list[Verdict] = field(default_factory=list)
    unsteady: list[Verdict] = field(default_factory=list)
    passed_on_gpu: list[Verdict] = field(default_factory=list)
    failed_on_gpu: list[Verdict] = field(default_factory=list)

    @property
    def is_error(self) -> bool:
        return bool(self.regressed or self.missing or self.failed_on_gpu)


def compare(
    baseline: Baseline,
    verdicts: Iterable[Verdict],
    catalogue: Collection[CaseName],
    categories: Mapping[CaseName, str],
    patterns: Sequence[str] = (),
) -> Comparison:
    """Compares a run with the list.

    Args:
        baseline: The expected results.
        verdicts: The results of the run.
        catalogue: All existing tests.
        categories: The category of each test that has one.
        patterns: The requested patterns; other tests of the list are not missing.
    """
    found = Comparison()
    for verdict in verdicts:
        expected = baseline.tests.get(verdict.case)
        if not verdict.is_steady:
            found.unsteady.append(verdict)
        is_for_gpu = needs_gpu(verdict.case, categories)
        if is_for_gpu and _is(expected, "skip"):
            if verdict.outcome != "skip":
                is_pass = verdict.outcome == "pass"
                (found.passed_on_gpu if is_pass else found.failed_on_gpu).append(verdict)
        elif verdict.outcome == "pass":
            if not _is(expected, "pass"):
                found.new.append(verdict)
        elif _is(expected, "pass"):
            if verdict.outcome == "fail" or not is_for_gpu:
                found.regressed.append(verdict)
        elif verdict.outcome == "fail":
            (found.on_purpose if _is(expected, "fail") else found.unlisted).append(verdict)
    found.missing.extend(_missing(baseline, catalogue, patterns))
    return found


def _missing(
    baseline: Baseline, catalogue: Collection[CaseName], patterns: Sequence[str]
) -> list[CaseName]:
    there = set(catalogue)
    listed = (case for case, expected in baseline.tests.items() if expected.outcome == "pass")
    return [case for case in select(listed, patterns) if case not in there]


def _is(expected: Expected | None, outcome: str) -> bool:
    return expected is not None and expected.outcome == outcome


def updated(
    baseline: Baseline,
    verdicts: Iterable[Verdict],
    catalogue: Collection[CaseName],
    torch: str,
) -> Baseline:
    """Returns the list with the new results of a run.

    New passes and skips are added, times are those of this run, and tests that no longer exist are
    removed. A test that is listed as passing stays so, whatever its result now: it is given up by
    hand, with a reason.
    """
    there = set(catalogue)
    tests = {case: expected for case, expected in baseline.tests.items() if case in there}
    for verdict in verdicts:
        before = tests.get(verdict.case)
        seconds = round(verdict.seconds, 1)
        if verdict.outcome == "pass":
            tests[verdict.case] = Expected("pass", seconds)
        elif before is None and verdict.outcome == "skip":
            tests[verdict.case] = Expected("skip", seconds)
        elif _is(before, verdict.outcome) and before is not None:
            tests[verdict.case] = replace(before, seconds=seconds)
    return Baseline(torch, tests)


def longest_first(cases: Iterable[CaseName], baseline: Baseline) -> list[CaseName]:
    """Returns the tests in the order that ends soonest when several run side by side.

    A test of unknown length comes first: it may be a long one.
    """
    unknown = Expected("pass", float("inf"))
    return sorted(cases, key=lambda case: -baseline.tests.get(case, unknown).seconds)
