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
    seconds, cpu_s = timed(work, runs, [process_clock(pid) for pid in pids])
    return {
        "values": [second / work.operations for second in seconds],
        "cpu_s": cpu_s / (runs * work.operations),
        "operations": work.operations,
    }


def _timed(work: Work, runs: int, clocks: Sequence[int]) -> tuple[list[float], float]:
    seconds = []
    run, clock = work.run, work.clock or time.perf_counter_ns
    cpu_before = _cpu_s(clocks)
    for _ in range(runs):
        begin = clock()
        run()
        seconds.append((clock() - begin) / 1e9)
    return seconds, _cpu_s(clocks) - cpu_before


def _timed_after_preparing(
    work: Work, runs: int, clocks: Sequence[int]
) -> tuple[list[float], float]:
    assert work.prepare is not None
    clock = work.clock or time.perf_counter_ns
    seconds = []
    cpu_s = 0.0
    for _ in range(runs):
        work.prepare()
        cpu_before = _cpu_s(clocks)
        begin = clock()
        work.run()
        seconds.append((clock() - begin) / 1e9)
        cpu_s += _cpu_s(clocks) - cpu_before
        if work.finish is not None:
            work.finish()
    return seconds, cpu_s


def _cpu_s(clocks: Sequence[int]) -> float:
    return sum(map(time.clock_gettime, clocks))


def process_clock(pid: int) -> int:
    """Returns the clock of the CPU time of all threads of a process (``clock_getcpuclockid``).

    It counts the same time as ``getrusage``, in nanoseconds. Other processes can read it, so that
    the callee need not be asked by a call that would itself be measured.
    """
    scheduler_clock = 2
    return (~pid << 3) | scheduler_clock
