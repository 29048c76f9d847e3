"""Compares the CPU time of calls in this tree with that of an earlier commit, in one run.

The base is a commit of the history: by default the one that the file ``base`` beside this module
names. It is unpacked into a temporary folder, and its native twin is built, if it has one and this
tree's is built. Both sides run the programs of this tree.

Two processes that run the same code differ by several percent for as long as they live, so more
rounds of the same processes settle nothing. Rows that seem slower are measured again in three fresh
groups of processes, and the median over these groups decides. Rows that exceed the limit even so
are measured in further groups, and the median over all of them decides.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.frame.figures import Rounds, ratio_of
from benchmarks.frame.group import ROOT
from benchmarks.frame.question import Question, Row, Side
from benchmarks.frame.run import end_on_sigterm, measured_placements, parse_options
from benchmarks.shapes.question import QUESTION
from torchweft.native import native

BASE_FILE = Path(__file__).with_name("base")
LIMIT = 1.10
"""The largest CPU time of a row, and of the mean of all rows, as a multiple of the base's."""
GROUPS = (3, 6, 9, 9)
"""Numbers of fresh groups of processes for the rows that still exceed the limit. All count."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures both sides, prints the ratio of each row, and returns 1 if the gate is closed."""
    end_on_sigterm()
    options = _parse(arguments)
    if not has_history(ROOT):
        print(f"not measured: this folder is no whole clone, so it has no commit {options.base}")
        return 0
    with unpacked(options.base) as folder:
        question = compared(QUESTION, folder)
        ratios, failures = _measure(question, options.works, options.rounds)
        repeated: list[dict[str, float]] = []
        for count in GROUPS:
            suspects = slower(ratios, options.limit)
            if not suspects:
                break
            print(f"measuring again: {', '.join(suspects)}", file=sys.stderr, flush=True)
            for _ in range(count):
                again, found = _measure(question, suspects, options.rounds)
                repeated.append(again)
                failures += found
            ratios |= medians(repeated)
    lines = verdict(ratios, options.limit, options.base)
    print("\n".join([*lines, *(f"failed: {failure}" for failure in failures)]))
    return 1 if failures or not is_open(ratios, options.limit) else 0


def compared(question: Question, base: Path) -> Question:
    """Returns the question with the base's sources as the side that ours is compared with.

    Args:
        question: A question whose programs fork their workers.
        base: Folder with the sources of the base.
    """
    sides = (
        Side("base", runner="forked", api="weft", environment={"PYTHONPATH": str(base / "src")}),
        Side("weft", runner="forked", api="weft", environment={"PYTHONPATH": str(ROOT / "src")}),
    )
    rows = tuple(dataclasses.replace(row, torch="base", targets=()) for row in question.rows)
    return dataclasses.replace(question, sides=sides, rows=rows, mean=0.0)


def ratios_of(rows: Sequence[Row], rounds: Rounds) -> dict[str, float]:
    """Returns the CPU time of each measured row as a multiple of the base's."""
    found = {}
    for row in rows:
        ratio = ratio_of(
            rounds.get((row.torch, row.name), ()), rounds.get((row.ours, row.name), ()), "cpu"
        )
        if ratio is not None:
            found[row.name] = 1 / ratio.median
    return found


def medians(measurements: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median ratio of each row over measurements of separate groups of processes."""
    rows = {name for ratios in measurements for name in ratios}
    return {
        name: statistics.median(ratios[name] for ratios in measurements if name in ratios)
        for name in rows
    }


def slower(ratios: Mapping[str, float], limit: float) -> list[str]:
    """Returns the rows that exceed the limit."""
    return [name for name, ratio in ratios.items() if ratio > limit]


def is_open(ratios: Mapping[str, float], limit: float) -> bool:
    """Returns whether no row, and so no mean of rows, exceeds the limit; false without rows."""
    return bool(ratios) and not slower(ratios, limit)


def verdict(ratios: Mapping[str, float], limit: float, base: str) -> list[str]:
    """Returns the ratio of each row, the largest first, and the mean as lines of text."""
    lines = [f"CPU time as a multiple of that of {base} (limit {limit:.2f})"]
    for name, ratio in sorted(ratios.items(), key=lambda item: -item[1]):
        lines.append(f"  {ratio:5.2f}  {name}{'   too slow' if ratio > limit else ''}")
    if ratios:
        mean = statistics.geometric_mean(ratios.values())
        lines.append(f"  {mean:5.2f}  geometric mean of {len(ratios)} rows")
    return lines


def has_history(folder: Path) -> bool:
    """Returns whether the folder is a clone with its whole history, not a part or an archive."""
    command = ["git", "-C", os.fspath(folder), "rev-parse", "--is-shallow-repository"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return False
    return told.stdout.strip() == "false"


@contextlib.contextmanager
def unpacked(commit: str) -> Iterator[Path]:
    """Unpacks a commit into a temporary folder, which the block may use.

    Raises:
        SystemExit: The clone has no such commit, or its native twin cannot be built.
    """
    archive = subprocess.run(
        ["git", "-C", os.fspath(ROOT), "archive", commit], capture_output=True, check=False
    )
    if archive.returncode:
        reason = archive.stderr.decode(errors="replace").strip()
        sys.exit(f"cannot read the base {commit}: {reason}")
    with tempfile.TemporaryDirectory(prefix="weft-gate-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as members:
            members.extractall(folder)
        if native is not None and Path(folder, "native").is_dir():
            _build(Path(folder))
        yield Path(folder)


def _build(folder: Path) -> None:
    """Builds the native twin of an unpacked commit where its sources find it."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if not any(folder.glob("src/torchweft/_native*")):
        sys.exit(f"cannot build the native twin of the base: {built.stdout}{built.stderr}")


def _measure(
    question: Question, works: Sequence[str] | None, rounds: int
) -> tuple[dict[str, float], list[str]]:
    arguments = ["--short", "--rounds", str(rounds), *(["--works", *works] if works else [])]
    options = parse_options(question, arguments)
    found: dict[str, float] = {}
    for _, measured in measured_placements(question, options):
        found |= ratios_of(options.rows, measured)
    return found, options.failures


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__)
    parser.add_argument("--base", default=BASE_FILE.read_text().strip(), help="a commit")
    parser.add_argument("--limit", type=float, default=LIMIT, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--works", nargs="+", choices=[row.name for row in QUESTION.rows])
    return parser.parse_args(arguments)
