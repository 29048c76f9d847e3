"""Alternates between the sides of a question, round by round."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import math
import subprocess
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.frame.figures import Round, Rounds
from benchmarks.frame.group import Group, SideFailed, started_group
from benchmarks.frame.placement import Cores
from benchmarks.frame.question import Question, Row, Side


def measure(question: Question, options: Namespace, cores: Cores) -> Rounds:
    """Measures every chosen row on every chosen side; returns their rounds.

    Options are ``rows``, ``sides``, ``rounds`` and ``scale``, as ``run.parse_options`` makes them.
    """
    if question.measure is not None:
        return question.measure(question, options, cores)
    rounds: dict[tuple[str, str], list[Round]] = defaultdict(list)
    sizes = {row: row.size or question.size for row in options.rows}
    for size in sorted(set(sizes.values())):
        rows = [row for row in options.rows if sizes[row] == size]
        sized = dataclasses.replace(question, size=size)
        _alternate(sized, Namespace(**{**vars(options), "rows": rows}), cores, rounds)
    return rounds


def _alternate(
    question: Question,
    options: Namespace,
    cores: Cores,
    rounds: dict[tuple[str, str], list[Round]],
) -> None:
    with contextlib.ExitStack() as running:
        groups = []
        for side in available([side for side in options.sides if _is_needed(side, options.rows)]):
            try:
                groups.append(running.enter_context(started_group(question, side, cores)))
            except SideFailed as failure:
                report_failure(options, failure)
        rows = [row for row in options.rows if _is_checked(options, groups, row)]
        for _ in range(options.rounds):
            # Reverse the order, so that no side always follows the same side.
            groups.reverse()
            for row in rows:
                _measure_row(options, groups, row, rounds)


def available(sides: Sequence[Side]) -> list[Side]:
    """Returns the sides whose module can be imported here; reports the skipped ones."""
    chosen = []
    for side in sides:
        if side.module and not _has(side):
            where = f" for {side.interpreter}" if side.interpreter else ""
            print(f"skipping {side.name}: {side.module} is not installed{where}", file=sys.stderr)
        else:
            chosen.append(side)
    return chosen


def _has(side: Side) -> bool:
    """Returns whether the side's interpreter finds its module."""
    if not side.interpreter:
        return importlib.util.find_spec(side.module) is not None
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    try:
        return not subprocess.run([side.interpreter, "-c", program, side.module]).returncode
    except OSError:
        return False


def takes_part(row: Row, group: Group) -> bool:
    """Returns whether the side has the row's work, and the row compares it or it is extra."""
    if row.activity and group.side.runner != "rpc":
        return False  # only the workers of a group have an idle main thread
    return row.work_name in group.works and _is_needed(group.side, [row])


def _is_needed(side: Side, rows: Sequence[Row]) -> bool:
    named = {name for row in rows for name in (row.ours, row.torch, row.limit)}
    return side.name in named or not side.is_default


def report_failure(options: Namespace, failure: SideFailed) -> None:
    """Reports that a side has failed, now and in the exit status."""
    options.failures.append(str(failure).splitlines()[0])
    print(failure, file=sys.stderr, flush=True)


def _measure_row(
    options: Namespace,
    groups: list[Group],
    row: Row,
    rounds: dict[tuple[str, str], list[Round]],
) -> None:
    for group in [group for group in groups if takes_part(row, group)]:
        try:
            measured = group.measure(row, max(1, int(row.operations * options.scale)))
        except SideFailed as failure:
            report_failure(options, SideFailed(f"{row.name}: {failure}"))
            groups.remove(group)  # its processes end with the measurement; other sides go on
        else:
            rounds[group.side.name, row.name].append(measured)


def _is_checked(options: Namespace, groups: list[Group], row: Row) -> bool:
    """Returns whether all sides return the same numbers, if the row has a check."""
    if not row.check:
        return True
    told: dict[tuple[str, str], list[Round]] = defaultdict(list)
    check = dataclasses.replace(row, work=row.check, activity="", warm_up=0)
    _measure_row(options, groups, check, told)
    numbers = [(side, rounds[0].values) for (side, _), rounds in told.items()]
    differences = [
        f"{row.name}: {row.check}: {side} tells {value}, but {other} {others_value}, at {place}"
        for (side, values), (other, others) in itertools.pairwise(numbers)
        for place, (value, others_value) in enumerate(zip(values, others, strict=True))
        if not _are_close(value, others_value)
    ]
    for difference in differences[:1]:
        report_failure(options, SideFailed(difference))
    return not differences


def _are_close(first: float, second: float) -> bool:
    # Sums of the same numbers in another order differ in their last bits.
    return math.isclose(first, second, rel_tol=1e-5)
