"""``python -m tests.faults``: many training runs, each with faults of its own."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import ctypes
import gc
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from tests.certificates import Authority
from tests.faults import hosts
from tests.faults.map_plan import Program, draw_maps
from tests.faults.plan import FATAL, HOSTS, NAMES, UNIX, Plan, draw
from tests.faults.running import Outcome, run
from tests.faults.verdict import must_have, problems
from tests.faults.worker import Report

_PR_SET_CHILD_SUBREAPER = 36
FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Carries out the requested runs; returns the exit code."""
    options = _parse(arguments)
    obstacle = hosts.isolate()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.collect()
    gc.freeze()
    folder = Path(tempfile.mkdtemp(prefix="weft-faults-"))
    try:
        with open(options.out, "a") if options.out else _nothing() as out:
            campaign = _Campaign(folder, options, out, obstacle)
            return campaign.run(options.only or range(options.first, options.first + options.runs))
    finally:
        shutil.rmtree(folder)


def _nothing() -> TextIO:
    return open(os.devnull, "w")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=200, metavar="N", help="how many")
    parser.add_argument("--maps", action="store_true", help="of training by maps")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these numbers instead")
    parser.add_argument("--out", type=Path, metavar="FILE", help="gets all lines, too")
    parser.add_argument(
        "--keep", type=Path, default=Path("runs/faults"), metavar="DIR",
        help="gets what the workers of runs that failed have written",
    )  # fmt: skip
    return parser.parse_args(arguments)


class _Campaign:
    def __init__(
        self, folder: Path, options: argparse.Namespace, out: TextIO, obstacle: str
    ) -> None:
        self._folder = folder
        self._has_maps = options.maps
        self._draw = draw_maps if options.maps else draw
        self._keep = options.keep
        self._out = out
        self._obstacle = obstacle
        self._tls = Authority(folder).options()
        self._took_s: defaultdict[str, list[float]] = defaultdict(list)
        self._counts: defaultdict[str, int] = defaultdict(int)

    def run(self, numbers: Sequence[int]) -> int:
        begin_s = time.monotonic()
        ranks = {name: rank for rank, name in enumerate(NAMES)}
        plan = Plan(-1, UNIX, False, ranks, program=Program() if self._has_maps else None)
        outcome = run(plan, self._tls, self._folder)
        report = outcome.endings[NAMES[0]].report or Report()
        self._say(f"without faults: {report.result or 'none'} in {outcome.took_s:.1f} s")
        wrong = problems(plan, outcome, report.result)
        if wrong or not report.result:
            self._complain(-1, wrong)
            return FAILED
        for number in numbers:
            self._run_one(self._draw(number), report.result)
        self._summarize(time.monotonic() - begin_s)
        return FAILED if self._counts["wrong"] else 0

    def _run_one(self, plan: Plan, result: str) -> None:
        if self._obstacle and plan.network == HOSTS:
            self._counts["skipped"] += 1
            self._say(f"{plan.number:6} skipped: no network of its own: {self._obstacle}")
            return
        if self._obstacle:  # The port may be in use.
            plan = replace(plan, has_store_server=False)
        outcome = run(plan, self._tls, self._folder)
        wrong = problems(plan, outcome, result)
        expected = must_have(plan, outcome)
        struck = "" if outcome.has_struck else ", did not strike"
        after = _after_s(plan, outcome)
        shown = "" if after is None else f", all over {after:5.2f} s after it"
        self._say(
            f"{plan.number:6} {'WRONG' if wrong else 'ok':5} {expected}{struck}{shown}; "
            f"{outcome.took_s:4.1f} s; {plan}"
        )
        self._counts["wrong" if wrong else "ok"] += 1
        self._counts["not struck"] += not outcome.has_struck
        main_fault = plan.faults[-1]
        of = f"{main_fault.kind} {main_fault.point or 'at any time'}"
        self._took_s[of].append(outcome.took_s if after is None else after)
        if wrong:
            self._complain(plan.number, wrong)

    def _complain(self, number: int, wrong: list[str]) -> None:
        for line in wrong:
            self._say(f"       {line}")
        maps = "--maps " if self._has_maps else ""
        kept = self._keep / f"{'maps-' if maps else ''}{number}"
        kept.mkdir(parents=True, exist_ok=True)
        for log in self._folder.glob("*.log"):
            shutil.copy(log, kept)
        self._say(f"       logs in {kept}; again: python -m tests.faults {maps}--only {number}")

    def _summarize(self, seconds: float) -> None:
        self._say(f"\n{'fault':28} runs  seconds until all was over: median, most")
        for of, took_s in sorted(self._took_s.items()):
            median_s, most_s = statistics.median(took_s), max(took_s)
            self._say(f"{of:28} {len(took_s):4}  {median_s:6.2f} {most_s:6.2f}")
        counts = ", ".join(f"{count} {what}" for what, count in self._counts.items())
        self._say(f"{counts} in {seconds:.0f} s")

    def _say(self, line: str) -> None:
        for stream in (sys.stdout, self._out):
            print(line, file=stream, flush=True)


def _after_s(plan: Plan, outcome: Outcome) -> float | None:
    """Returns how long after its main fault a run was over; None where that has no meaning."""
    struck_s = outcome.struck_s[-1]
    if plan.faults[-1].kind not in FATAL or struck_s is None:
        return None
    return max(ending.ended_s for ending in outcome.endings.values()) - struck_s


if __name__ == "__main__":
    sys.exit(main())
