"""Thousands of clients come to a server of an open group and go: does anything grow?

See the README beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.endurance.clients import (
    SERVER,
    WAYS,
    Clients,
    Joined,
    Stuck,
    begin_service,
    join,
)
from benchmarks.endurance.samples import (
    KINDS,
    Course,
    Kind,
    Sample,
    count_types,
    grown,
    return_large_blocks,
    table,
    take_sample,
)
from benchmarks.frame.report import provenance
from benchmarks.frame.run import end_on_sigterm, save
from torchweft import knobs, rpc

AT_ONCE = 3
"""How many clients there are at a time."""
TIDY = 0
"""The number of a client that leaves. As every newcomer, it takes dead ones out of the store."""
_SETTLE_LIMIT_S = 20.0
_IDLE_S = 2.0
"""How long the server keeps unused memory; it looks twice in that time."""

DEPARTURE_KINDS = {
    **KINDS,
    # Up to 256 queues of senders that are gone are dropped together.
    "objects of Weft": Kind("", 1, 300),
    "Python objects": Kind("", 1, 2000),
    "file of the store": Kind("kB", 1e-3, 200),
    "time of joining (median)": Kind("ms", 1e3, 0.005, is_time=True),
    "CPU of joining (median)": Kind("ms", 1e3, 0.002, is_time=True),
}
"""What must not grow, with what may change for other reasons."""


def main() -> int:
    """Runs all clients against this process; returns 1 if anything grows, or a client is stuck."""
    end_on_sigterm()
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        lines, is_good = run(f"{folder}/store", options.clients, options.samples)
    report = "\n".join(["# Departures", "", provenance(), "", *lines]) + "\n"
    print(report)
    if options.save:
        save(report, Path(__file__).parent, options.save)
    return 0 if is_good else 1


def run(path: str, count: int, samples: int) -> tuple[list[str], bool]:
    """Runs clients as ``measure`` does.

    Returns:
        A report, and whether nothing grows and all clients have ended.
    """
    began_s = time.monotonic()
    courses, killed, types = measure(path, count, samples)
    elapsed_s = time.monotonic() - began_s
    title = f"## {count:,} clients by {len(WAYS)} ways out, {elapsed_s:.0f} s"
    lines = [title, "", *table([(SERVER, *each) for each in courses.items()]), ""]
    for way, number in Counter(each.way for each in killed).items():
        lines += [f"{number} clients that were to {way} did not end, and were killed.", ""]
    for each in killed:
        lines += [f"Output of a client that was to {each.way}:", "", "```", each.output, "```", ""]
    is_flat = all(course.is_flat for course in courses.values())
    if not is_flat:
        lines += ["Types that grew since the middle:", ""]
        lines += [*grown({SERVER: types[0]}, {SERVER: types[-1]}), ""]
    return lines, is_flat and not killed


def measure(
    path: str, count: int, samples: int
) -> tuple[dict[str, Course], list[Stuck], list[Counter[str]]]:
    """Makes this process the server of a group that meets in a file, and runs its clients.

    Args:
        path: The file.
        count: How many clients come and go.
        samples: How often to look.

    Returns:
        The course of each kind of resource, the clients that did not end, and the objects by type
        in the middle and in the end.
    """
    taken: list[Sample] = []
    killed: list[Stuck] = []
    types: list[Counter[str]] = []
    with contextlib.closing(Clients(f"file://{path}")) as clients:
        return_large_blocks()
        with knobs.POOL_IDLE_S.override(_IDLE_S):
            join(SERVER, 0, f"file://{path}")
        try:
            begin_service()
            for number in range(samples):
                first, last = count * number // samples, count * (number + 1) // samples
                joined: list[Joined] = []
                for start in range(first, last, AT_ONCE):
                    found, stuck = clients.run(range(start, min(start + AT_ONCE, last)))
                    joined += found
                    killed += stuck
                clients.run([TIDY])
                taken.append({**_settled_sample(), **_of_joining(path, joined)})
                if number in (samples // 2, samples - 1):
                    types.append(count_types())
                print(f"{last} of {count} clients", file=sys.stderr, flush=True)
        finally:
            rpc.shutdown(graceful=False)
    courses = {
        kind: Course(each, [sample[kind] for sample in taken])
        for kind, each in DEPARTURE_KINDS.items()
    }
    return courses, killed, types


def _settled_sample() -> Sample:
    """Takes a sample once the server has noticed that all clients are gone.

    The memory of a lost client becomes unused at one look of the server, and goes at a later one.
    """
    deadline_s = time.monotonic() + _SETTLE_LIMIT_S
    time.sleep(2 * _IDLE_S)
    previous = take_sample()
    while True:
        time.sleep(0.4)  # Longer than messages about references are held; no event marks the end.
        current = take_sample()
        same = all(current[kind] == previous[kind] for kind in ("tensors", "descriptors"))
        if same or time.monotonic() > deadline_s:
            return current
        previous = current


def _of_joining(path: str, joined: Sequence[Joined]) -> Sample:
    return {
        "file of the store": os.stat(path).st_size,
        "time of joining (median)": statistics.median(each.elapsed_s for each in joined),
        "CPU of joining (median)": statistics.median(each.cpu_s for each in joined),
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endurance.departures")
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--save", metavar="NAME", help="also write results/<date>-NAME.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
