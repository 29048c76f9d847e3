"""Makes a million calls and thousands of contexts; the exit status says whether any resource grew.

See the README beside this file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.endurance.samples import (
    KINDS,
    Course,
    Sample,
    count_types,
    grown,
    table,
    take_sample,
)
from benchmarks.endurance.work import CALLEE, CALLS_A_TURN, Mix, run_context
from benchmarks.frame.report import provenance
from benchmarks.frame.run import end_on_sigterm, save
from torchweft import cluster, rpc

CALLER = "driver"
SETTLE_LIMIT_S = 5.0

Samples = dict[str, list[Sample]]
"""The samples of each process, by its name."""


def main() -> int:
    """Runs both phases in one group; returns 1 if a resource grows."""
    end_on_sigterm()
    options = parse_options()
    lines = ["# Endurance", "", provenance(), ""]
    with cluster(workers=1, name=CALLER):
        mix = Mix(CALLER)
        turns = max(1, options.calls // CALLS_A_TURN // options.samples)
        is_flat = [
            _phase(lines, "calls", mix.turn, turns, CALLS_A_TURN, options.samples),
            _phase(lines, "contexts", run_context, options.contexts // options.samples, 1,
                   options.samples),
        ]  # fmt: skip
    report = "\n".join(lines) + "\n"
    print(report)
    if options.save:
        save(report, Path(__file__).parent, options.save)
    return 0 if all(is_flat) else 1


def _phase(
    lines: list[str],
    name: str,
    run: Callable[[], None],
    runs: int,
    operations: int,
    samples: int,
) -> bool:
    """Runs a phase, samples in between, and adds a table; returns whether everything is flat."""
    begin = time.monotonic()
    types = [_types_of_both()]
    taken: Samples = {CALLER: [], CALLEE: []}
    for number in range(samples):
        for _ in range(runs):
            run()
        for process, sample in _settled_samples().items():
            taken[process].append(sample)
        if number == samples // 2:
            types.append(_types_of_both())
        print(f"{name}: {number + 1} of {samples}", file=sys.stderr, flush=True)
    types.append(_types_of_both())
    total, elapsed_s = runs * operations * samples, time.monotonic() - begin
    courses = _courses(taken)
    lines += [f"## {total:,} {name}, {elapsed_s:.0f} s", "", *table(courses), ""]
    if all(course.is_flat for _, _, course in courses):
        return True
    lines += ["Types that grew since the middle:", "", *grown(types[-2], types[-1]), ""]
    return False


def _settled_samples() -> dict[str, Sample]:
    """Samples both processes once drops of references have been sent and processed."""
    deadline = time.monotonic() + SETTLE_LIMIT_S
    previous = _samples()
    while True:
        time.sleep(0.05)  # drops are sent in batches; no event marks the last one
        current = _samples()
        same = all(
            current[process][kind] == previous[process][kind]
            for process in current
            for kind in ("objects of Weft", "tensors")
        )
        if same or time.monotonic() > deadline:
            return current
        previous = current


def _samples() -> dict[str, Sample]:
    return {CALLER: take_sample(), CALLEE: rpc.rpc_sync(CALLEE, take_sample)}


def _types_of_both() -> dict[str, Counter[str]]:
    return {CALLER: count_types(), CALLEE: rpc.rpc_sync(CALLEE, count_types)}


def _courses(taken: Samples) -> list[tuple[str, str, Course]]:
    return [
        (process, kind, Course(KINDS[kind], [sample[kind] for sample in samples]))
        for process, samples in taken.items()
        for kind in KINDS
    ]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endurance")
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--contexts", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--save", metavar="NAME", help="also write results/<date>-NAME.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
