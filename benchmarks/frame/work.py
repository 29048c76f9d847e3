"""The works that a worker process measures: functions that run repeatedly, timed run by run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Work(NamedTuple):
    """A function to run repeatedly.

    Attributes:
        run: The timed function.
        operations: Number of operations in one run, such as the calls of a batch.
        is_counted: Whether ``run`` returns how many operations it made; ``operations`` is then
            about that number.
        prepare: Runs before each run, and is not timed.
        finish: Runs after each run that was prepared, and is not timed.
        clock: Times a run, in nanoseconds, in place of ``time.perf_counter_ns``. For the CPU time
            of the first worker alone, where that worker serves: ``time.process_time_ns``.
    """

    run: Callable[[], object]
    operations: int = 1
    prepare: Callable[[], object] | None = None
    finish: Callable[[], object] | None = None
    clock: Callable[[], int] | None = None
    is_counted: bool = False


class Numbers(NamedTuple):
    """A function that returns numbers, such as losses, instead of being timed.

    Attributes:
        tell: Returns the numbers.
    """

    tell: Callable[[], Sequence[float]]


def measure(work: Work | Numbers, operations: int, pids: Sequence[int]) -> dict[str, Any]:
    """Makes at least ``operations`` operations; returns the fields of a ``figures.Round``.

    Args:
        work: The work to run.
        operations: Number of operations, rounded up to whole runs.
        pids: The processes whose CPU time counts.
    """
    if isinstance(work, Numbers):
        return {"values": list(work.tell())}
    runs = -(-operations // work.operations)
    timed = _timed if work.prepare is None else _timed_after_preparing
    seconds, results, cpu_s = timed(work, runs, [process_clock(pid) for pid in pids])
    counts = results if work.is_counted else [work.operations] * runs
    return {
        "values": [second / count for second, count in zip(seconds, counts, strict=True)],
        "cpu_s": cpu_s / sum(counts),
        "operations": work.operations,
    }


def _timed(work: Work, runs: int, clocks: Sequence[int]) -> tuple[list[float], list[Any], float]:
    """Returns the seconds of each run, its results, and the CPU time of all."""
    seconds, results = [], []
    run, clock = work.run, work.clock or time.perf_counter_ns
    cpu_before = _cpu_s(clocks)
    for _ in range(runs):
        begin = clock()
        result = run()
        seconds.append((clock() - begin) / 1e9)
        if work.is_counted:  # Others are dropped, as by a program that goes on.
            results.append(result)
    return seconds, results, _cpu_s(clocks) - cpu_before


def _timed_after_preparing(
    work: Work, runs: int, clocks: Sequence[int]
) -> tuple[list[float], list[Any], float]:
    assert work.prepare is not None
    clock = work.clock or time.perf_counter_ns
    seconds, results = [], []
    cpu_s = 0.0
    for _ in range(runs):
        work.prepare()
        cpu_before = _cpu_s(clocks)
        begin = clock()
        result = work.run()
        seconds.append((clock() - begin) / 1e9)
        if work.is_counted:
            results.append(result)
        cpu_s += _cpu_s(clocks) - cpu_before
        if work.finish is not None:
            work.finish()
    return seconds, results, cpu_s


def _cpu_s(clocks: Sequence[int]) -> float:
    return sum(map(time.clock_gettime, clocks))


def process_clock(pid: int) -> int:
    """Returns the clock of the CPU time of all threads of a process (``clock_getcpuclockid``).

    It counts the same time as ``getrusage``, in nanoseconds. Other processes can read it, so that
    the callee need not be asked by a call that would itself be measured.
    """
    scheduler_clock = 2
    return (~pid << 3) | scheduler_clock
