"""The names of PyTorch's tests, and the results of their runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Outcome = Literal["pass", "fail", "skip", "timeout", "crash"]
"""``crash``: the process that watches the test's workers died itself."""


class CaseName(NamedTuple):
    """One test: the fixture it runs with (``tp``, ``faulty``, ``cuda``), its class, its name."""

    suite: str
    group: str
    test: str

    def __str__(self) -> str:
        return ".".join(self)

    @classmethod
    def parse(cls, text: str) -> CaseName:
        parts = text.split(".")
        if len(parts) != 3:
            raise ValueError(f"{text!r} is no test; one is written suite.Class.test_name")
        return cls(*parts)


@dataclass(frozen=True)
class Result:
    """One run of one test."""

    case: CaseName
    outcome: Outcome
    seconds: float
    log: Path


@dataclass(frozen=True)
class Verdict:
    """All runs of one test."""

    case: CaseName
    results: Sequence[Result]

    @property
    def worst(self) -> Result:
        """The run that went worst: the first that failed, or else one that was skipped."""
        failed = [result for result in self.results if result.outcome not in ("pass", "skip")]
        skipped = [result for result in self.results if result.outcome == "skip"]
        return [*failed, *skipped, *self.results][0]

    @property
    def outcome(self) -> Literal["pass", "fail", "skip"]:
        worst = self.worst.outcome
        return worst if worst in ("pass", "skip") else "fail"

    @property
    def passes(self) -> int:
        return sum(result.outcome == "pass" for result in self.results)

    @property
    def is_steady(self) -> bool:
        return len({result.outcome == "pass" for result in self.results}) == 1

    @property
    def seconds(self) -> float:
        return max(result.seconds for result in self.results)


def verdicts_of(results: Iterable[Result]) -> list[Verdict]:
    """Returns a verdict for each test, in the order of the tests' names."""
    runs: dict[CaseName, list[Result]] = {}
    for result in results:
        runs.setdefault(result.case, []).append(result)
    return [Verdict(case, runs[case]) for case in sorted(runs)]


def select(cases: Iterable[CaseName], patterns: Sequence[str]) -> list[CaseName]:
    """Returns the tests whose written name contains one of ``patterns``; all without patterns."""
    return [
        case for case in cases if not patterns or any(pattern in str(case) for pattern in patterns)
    ]
