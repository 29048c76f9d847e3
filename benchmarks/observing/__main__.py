"""Measures what observing costs; the exit status says whether a target is missed."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from benchmarks.frame.report import provenance
from benchmarks.frame.run import end_on_sigterm, save
from benchmarks.frame.summary import aligned
from benchmarks.observing import work
from torchweft import cluster, knobs, rpc
from torchweft.observe.group import find
from torchweft.observe.session import Access

CALLEE = "worker0"
HEAD = ["| | caller | callee | both | more than off | least of both | more than off | a call |"]
HEAD += ["|---|---|---|---|---|---|---|---|"]
TARGETS = {work.COUNTERS: 0.05, work.TRACE: 0.25}
REPORT_TARGET = 0.01
"""Share of a core for one report a second."""
_VALUES = 300


def main() -> int:
    """Measures; returns 1 if a target is missed."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="blocks of each kind")
    parser.add_argument("--calls", type=int, default=1000, help="calls of a block")
    parser.add_argument("--reports", type=int, default=100, help="reports to an observer")
    parser.add_argument("--save", metavar="NAME", help="also write results/<date>-NAME.md")
    options = parser.parse_args()
    core = min(os.sched_getaffinity(0))
    work.pin(core)
    # A thread that spins takes all the time of the core that both workers share.
    with knobs.SPIN_S.override(0.0), cluster(workers=1, threads=1) as group:
        rpc.rpc_sync(CALLEE, work.pin, args=(core,))
        blocks = _blocks(options.rounds, options.calls)
        values = [rpc.remote(CALLEE, work.own, args=(1,)) for _ in range(_VALUES)]
        observed = find(str(group.pids[CALLEE]), Access())
        report_s = work.report_s(observed, CALLEE, options.reports)
        del values
        rpc.rpc_sync(CALLEE, work.watch, args=(work.OFF,))
        work.watch(work.OFF)
    report, is_met = _report(blocks, report_s, options)
    print(report)
    if options.save:
        save(report, Path(__file__).parent, options.save)
    return 0 if is_met else 1


def _blocks(rounds: int, calls: int) -> dict[str, list[work.Block]]:
    blocks: dict[str, list[work.Block]] = {mode: [] for mode in work.MODES}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
        # Each round begins with another mode, so that none always follows the same one.
        shift = number % len(work.MODES)
        for mode in (*work.MODES[shift:], *work.MODES[:shift]):
            blocks[mode].append(work.measure(CALLEE, mode, calls))
    return blocks


def _report(
    blocks: dict[str, list[work.Block]], report_s: float, options: argparse.Namespace
) -> tuple[str, bool]:
    table, more = list(HEAD), {}
    least_off_s = min(each.both_s for each in blocks[work.OFF])
    for mode, found in blocks.items():
        ratios = [one.both_s / off.both_s for one, off in zip(found, blocks[work.OFF], strict=True)]
        more[mode] = statistics.median(ratios) - 1
        times = [
            statistics.median(getattr(each, name) for each in found) * 1e6
            for name in ("caller_s", "callee_s", "both_s", "call_s")
        ]
        least_s = min(each.both_s for each in found)
        cells = [f"{each:.1f} us" for each in times]
        cells[3:3] = [f"{more[mode]:.1%}", f"{least_s * 1e6:.1f} us"]
        cells[5:5] = [f"{least_s / least_off_s - 1:.1%}"]
        table.append(f"| {mode} | {' | '.join(cells)} |")
    verdicts = [
        (f"{mode}: {more[mode]:.1%} more processor time of a small call, at most {target:.0%}", ok)
        for mode, target in TARGETS.items()
        for ok in [more[mode] <= target]
    ]
    load = report_s / 1.0
    verdicts.append(
        (
            f"a report takes {report_s * 1e3:.2f} ms of a worker that owns {_VALUES} values: one "
            f"a second is {load:.2%} of a core, at most {REPORT_TARGET:.0%}",
            load <= REPORT_TARGET,
        )
    )
    lines = [f"- {'met' if is_met else 'MISSED'}: {text}" for text, is_met in verdicts]
    about = (
        f"Processor time for a call that returns its argument, two workers on one core: medians of "
        f"{options.rounds} blocks of {options.calls} calls; the ratio is that of the blocks of one "
        "round."
    )
    head = ["# What observing costs", "", provenance(), "", about, ""]
    report = "\n".join([*head, *aligned(table), "", *lines]) + "\n"
    return report, all(is_met for _, is_met in verdicts)


if __name__ == "__main__":
    sys.exit(main())
