"""Starts groups of each size on each side, one after the other, and collects their figures."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.frame.figures import Round, Rounds
from benchmarks.frame.group import ROOT, SideFailed
from benchmarks.frame.measuring import available, report_failure
from benchmarks.frame.placement import Cores

if TYPE_CHECKING:
    from benchmarks.frame.question import Question, Row, Side

SMALLEST = 2
LARGEST_OF_TORCH = 32
NEST_TIMEOUT_S = 240.0

# Figures that must not grow with the group, and the rows that check this.
GROWTH = {"callee sockets": "growth of sockets"}

Found = dict[str, Any]
"""The figures of one group: for each, a ``Round`` as JSON."""


def measure_sizes(question: Question, options: Namespace, cores: Cores) -> Rounds:
    """Measures all sizes that the chosen rows need; ``nest.py`` describes the method."""
    rounds: dict[tuple[str, str], list[Round]] = defaultdict(list)
    for number in range(options.rounds):
        for side in available(options.sides)[:: 1 if number % 2 else -1]:
            try:
                _measure_side(side, options, cores, rounds)
            except SideFailed as failure:
                report_failure(options, failure)
    return rounds


def _measure_side(
    side: Side, options: Namespace, cores: Cores, rounds: dict[tuple[str, str], list[Round]]
) -> None:
    largest = LARGEST_OF_TORCH if side.api == "torch" else math.inf
    rows = [row for row in options.rows if size_of(row) <= largest]
    sizes = {size_of(row) for row in rows}
    if any(row.work in GROWTH.values() for row in rows):
        sizes.add(SMALLEST)
    by_size = run_nest(side, sorted(sizes), cores, options.scale)
    for row in rows:
        rounds[side.name, row.name].append(_figure(row, by_size))


def size_of(row: Row) -> int:
    """Returns the size of the group that a row is about: the end of its name."""
    return int(row.name.split()[-1])


def _figure(row: Row, by_size: dict[int, Found]) -> Round:
    size = size_of(row)
    for figure, growth in GROWTH.items():
        if row.work == growth:
            large, small = (by_size[one][figure]["values"][0] for one in (size, SMALLEST))
            return Round([large / small])
    return Round(**by_size[size][row.work])


def run_nest(side: Side, sizes: Sequence[int], cores: Cores, scale: float) -> dict[int, Found]:
    """Runs a group of each size from start to end, and returns their figures.

    Raises:
        SideFailed: The side failed, or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        order = {
            "api": side.api,
            "sizes": list(sizes),
            "cores": [sorted(cores(rank)) for rank in range(max(sizes))],
            "calls": max(20, int(400 * scale)),
            "options": dict(side.options),
            # A TCP store looks up the name of each client, which takes seconds if the resolver
            # loses one of so many queries; that says nothing about a library.
            "stores": folder,
        }
        return {int(size): found for size, found in _run(side, order).items()}


def _run(side: Side, order: dict[str, Any]) -> dict[str, Found]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.scale.nest", json.dumps(order)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **side.environment},
    ) as nest:
        try:
            output, errors = nest.communicate(timeout=NEST_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            output, errors = "", f"no end after {NEST_TIMEOUT_S:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(nest.pid, signal.SIGKILL)
    if not output:
        tail = errors.splitlines()[-10:]
        raise SideFailed("\n".join([f"side {side.name}: groups of {order['sizes']} failed", *tail]))
    found: dict[str, Found] = json.loads(output)
    return found
