"""Writes the results in ``expected.csv`` into ``docs/migration.md``.

``python -m tests.contract.conformance.report`` prints the text, with ``--write`` it replaces the
text of the page.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tests.contract.conformance.cases import CaseName
from tests.contract.conformance.lists import HERE, Baseline, Expected, read_categories

PAGE = HERE.parents[2] / "docs" / "migration.md"
COMMAND = "python -m tests.contract.conformance.report --write"
BEGIN = f"<!-- begin: written by `{COMMAND}` -->"
END = "<!-- end -->"


def text_of(baseline: Baseline, categories: Mapping[CaseName, str]) -> str:
    """Returns the part of the page that the lists determine."""
    tests = {case: baseline.tests.get(case) for case in [*categories, *baseline.tests]}
    return "\n".join([*_figures(baseline, tests, categories), "", *_not_passed(tests)])


def _figures(
    baseline: Baseline,
    tests: Mapping[CaseName, Expected | None],
    categories: Mapping[CaseName, str],
) -> Iterator[str]:
    counts: dict[str, Counter[str]] = {}
    for case, expected in tests.items():
        row = counts.setdefault(categories.get(case, "unknown"), Counter())
        row.update(("all", _outcome(expected)))
    total = sum(counts.values(), Counter())
    yield (
        f"Of the {total['all']} tests in the wheel of torch {baseline.torch}, Weft passes "
        f"{total['pass']} on a machine without a GPU; {total['skip']} are skipped there, by stock "
        f"PyTorch as well."
    )
    yield ""
    yield "| category | tests | pass | do not pass | skipped |"
    yield "|---|---:|---:|---:|---:|"
    for name, row in [*counts.items(), ("**all**", total)]:
        yield f"| {name} | {row['all']} | {row['pass']} | {row['fail']} | {row['skip']} |"


def _not_passed(tests: Mapping[CaseName, Expected | None]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[CaseName]] = {}
    for case, expected in tests.items():
        if _outcome(expected) == "fail":
            key = (expected.difference, expected.reason) if expected else ("", "")
            groups.setdefault(key, []).append(case)
    yield "Not passed, and why:"
    for (difference, reason), cases in sorted(groups.items(), key=lambda group: _rank(group[0])):
        yield ""
        if difference:
            yield f"- **[{difference}](#{difference})**: {reason} ({len(cases)})"
        else:
            yield f"- **not explained yet** ({len(cases)})"
        for group in sorted({(case.suite, case.group) for case in cases}):
            names = [
                f"`{case.test}`" for case in sorted(cases) if (case.suite, case.group) == group
            ]
            yield f"  - `{'.'.join(group)}`: {', '.join(names)}"


def _rank(key: tuple[str, str]) -> tuple[bool, str, str]:
    return (not key[0], *key)


def _outcome(expected: Expected | None) -> str:
    return expected.outcome if expected is not None else "fail"


def replaced(page: str, text: str) -> str:
    """Returns the page with the part between the two marks replaced."""
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*{re.escape(END)}", re.DOTALL)
    changed, count = pattern.subn(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page)
    if count != 1:
        raise ValueError(f"the page needs one part between {BEGIN!r} and {END!r}")
    return changed


def main(arguments: Sequence[str]) -> int:
    """Prints or writes the text; returns the exit code."""
    text = text_of(Baseline.read(), read_categories())
    if "--write" in arguments:
        PAGE.write_text(replaced(PAGE.read_text(), text))
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
