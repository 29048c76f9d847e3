"""The two committed lists: each test's category, and its result in the recorded run."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.contract.conformance.cases import CaseName

HERE = Path(__file__).parent
CATEGORIES = HERE / "categories.csv"
EXPECTED = HERE / "expected.csv"
SAMPLE = HERE / "sample.txt"

UNKNOWN = "unknown"
"""The category of a test that is not in the list: another torch has other tests."""

_RECORDED_WITH = "# recorded with torch "
_COLUMNS = ("suite", "class", "test", "expected", "seconds", "difference", "reason")


@dataclass(frozen=True)
class Expected:
    """What is expected of a test.

    Attributes:
        outcome: ``fail`` says that Weft is known not to pass it.
        seconds: How long it took.
        difference: Where a test fails: the heading of ``docs/migration.md`` that explains it.
        reason: The same in a few words.
    """

    outcome: Literal["pass", "fail", "skip"]
    seconds: float = 0.0
    difference: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Baseline:
    """What is expected of all tests, and the torch it was recorded with."""

    torch: str = ""
    tests: Mapping[CaseName, Expected] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = EXPECTED) -> Baseline:
        """Reads the list; a missing file is an empty list."""
        if not path.exists():
            return cls()
        first, _, rest = path.read_text().partition("\n")
        if not first.startswith(_RECORDED_WITH):
            raise ValueError(f"{path}: the first line must begin with {_RECORDED_WITH!r}")
        rows = csv.DictReader(io.StringIO(rest))
        return cls(first.removeprefix(_RECORDED_WITH), {_case(row): _expected(row) for row in rows})

    def write(self, path: Path = EXPECTED) -> None:
        """Writes the list, sorted by name."""
        text = io.StringIO()
        text.write(f"{_RECORDED_WITH}{self.torch}\n")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for case, what in sorted(self.tests.items()):
            seconds = f"{what.seconds:.1f}"
            writer.writerow([*case, what.outcome, seconds, what.difference, what.reason])
        path.write_text(text.getvalue())


def read_categories(path: Path = CATEGORIES) -> dict[CaseName, str]:
    """Returns the category of each test that has one."""
    with path.open() as rows:
        return {_case(row): row["category"] for row in csv.DictReader(rows)}


def read_sample(path: Path = SAMPLE) -> list[CaseName]:
    """Returns the tests that `make test` runs."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [CaseName.parse(line) for line in lines if line]


def _case(row: Mapping[str, str]) -> CaseName:
    return CaseName(row["suite"], row["class"], row["test"])


def _expected(row: Mapping[str, str]) -> Expected:
    outcome = row["expected"]
    if outcome not in ("pass", "fail", "skip"):
        raise ValueError(f"{_case(row)}: expected must be pass, fail or skip, not {outcome!r}")
    return Expected(outcome, float(row["seconds"] or 0), row["difference"], row["reason"])  # type: ignore[arg-type]
