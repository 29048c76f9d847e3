"""The summary of a run: tables by category and class, and what went wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.contract.conformance.cases import CaseName, Verdict
from tests.contract.conformance.comparing import Comparison, needs_gpu
from tests.contract.conformance.lists import UNKNOWN

COLUMNS = ("tests", "pass", "fail", "expected to fail", "skip")

LAST_LINES = 14
"""How much of a failed test's log is shown."""

_SKIPPED = re.compile(r"skipped (['\"])(.*)\1")
_NEEDS_MORE = re.compile(r"Need at least \d+ CUDA device")

_LOG_PREFIX = re.compile(r"^[DIWEF]\d{4} \S+ \d+ \S+:\d+\] ?")
"""The prefix of torch's loggers on each line: level and date, time, process, place."""


def count(
    verdicts: Iterable[Verdict],
    on_purpose: Iterable[Verdict],
    key: Callable[[CaseName], str],
) -> dict[str, Counter[str]]:
    """Returns how many tests there are of each outcome, by the ``key`` of a test."""
    excused = {verdict.case for verdict in on_purpose}
    counts: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        row = counts.setdefault(key(verdict.case), Counter())
        outcome = "expected to fail" if verdict.case in excused else verdict.outcome
        row.update(("tests", outcome))
    return counts


def format_table(title: str, counts: Mapping[str, Counter[str]]) -> list[str]:
    """Returns the lines of a table, with a sum where there is more than one row."""
    rows = dict(counts)
    if len(rows) > 1:
        rows["all"] = sum(counts.values(), Counter())
    width = max(len(title), *map(len, rows))
    lines = ["  ".join([f"{title:{width}}", *COLUMNS])]
    for name, row in rows.items():
        cells = [f"{row[column] or '-':>{len(column)}}" for column in COLUMNS]
        lines.append("  ".join([f"{name:{width}}", *cells]))
    return lines


def tables(
    verdicts: Sequence[Verdict], comparison: Comparison, categories: Mapping[CaseName, str]
) -> Iterator[str]:
    """Yields the lines of the tables by category and by class."""

    def category_of(case: CaseName) -> str:
        return categories.get(case, UNKNOWN)

    by_category = count(verdicts, comparison.on_purpose, category_of)
    order = list(dict.fromkeys(categories.values()))
    names = sorted(by_category, key=lambda name: order.index(name) if name in order else len(order))
    yield from format_table("category", {name: by_category[name] for name in names})
    yield ""
    by_class = count(verdicts, comparison.on_purpose, lambda case: f"{case.suite}.{case.group}")
    yield from format_table("class", by_class)


def findings(comparison: Comparison, baseline_torch: str, torch: str) -> Iterator[str]:
    """Yields the lines that say what is wrong or new, and what to do."""
    other = (
        "" if baseline_torch == torch else f" (recorded with torch {baseline_torch}, not {torch})"
    )
    yield from _failures(
        f"{{}} listed as passing, did not pass{other}: mend it, or say in expected.csv that it is "
        "expected to fail, by which difference and why",
        comparison.regressed,
    )
    if comparison.missing:
        yield ""
        yield (
            f"{len(comparison.missing)} listed as passing, and not among the tests of torch {torch}"
            f"{other}: renamed or removed? Then run again with --update"
        )
        yield from (f"  {case}" for case in comparison.missing)
    yield from _failures(
        "{} failed, and expected.csv says nothing of them: a pass is added by --update, a failure "
        "by hand, with its difference and reason",
        comparison.unlisted,
    )
    yield from _failures("{} that need a GPU failed", comparison.failed_on_gpu)
    if comparison.unsteady:
        yield ""
        yield f"{len(comparison.unsteady)} did not pass every time"
        for verdict in comparison.unsteady:
            yield f"  {verdict.passes} of {len(verdict.results)}  {verdict.case}"
    if comparison.new:
        yield ""
        yield f"{len(comparison.new)} pass that are not listed as passing: --update adds them"
        yield from (f"  {verdict.case}" for verdict in comparison.new)


def gpu_summary(verdicts: Iterable[Verdict], categories: Mapping[CaseName, str]) -> Iterator[str]:
    """Yields the lines that count the tests for which this machine has enough GPUs."""
    counts: Counter[str] = Counter()
    named: list[str] = []
    beyond = 0
    for verdict in verdicts:
        if not needs_gpu(verdict.case, categories):
            continue
        reason = skip_reason(verdict.worst.log) if verdict.outcome == "skip" else ""
        if _NEEDS_MORE.match(reason):
            beyond += 1
            continue
        counts[verdict.outcome] += 1
        if verdict.outcome != "pass":
            named.append(f"  {verdict.worst.outcome.upper()} {verdict.case} {reason}".rstrip())
    yield ""
    yield (
        f"CUDA tests that the GPUs of this machine can run: {counts.total()}, of which "
        f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped; "
        f"{beyond} more need more GPUs"
    )
    yield from named


def skip_reason(log: Path) -> str:
    """Returns why a test was skipped, according to its log."""
    found = _SKIPPED.findall(log.read_text(errors="replace")) if log.exists() else []
    return str(found[-1][1]) if found else ""


def _failures(title: str, verdicts: Sequence[Verdict]) -> Iterator[str]:
    if not verdicts:
        return
    yield ""
    yield title.format(len(verdicts))
    for verdict in verdicts:
        worst = verdict.worst
        yield f"  {worst.outcome.upper()} {verdict.case} ({worst.seconds:.1f} s), {worst.log}"
        yield from (f"      {line}" for line in last_lines(worst.log))


def last_lines(log: Path, number: int = LAST_LINES) -> list[str]:
    """Returns the last lines of a test's log that say something."""
    try:
        text = log.read_text(errors="replace")
    except FileNotFoundError:
        return ["(no log)"]
    head, found, _ = text.rpartition("\nRan 1 test in ")
    lines = [_LOG_PREFIX.sub("", line) for line in (head if found else text).splitlines()]
    return [line for line in lines if line.strip(" -=")][-number:]
