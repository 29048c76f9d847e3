"""Samples the resources of a process, and judges whether a series of samples is flat."""

from __future__ import annotations

import ctypes
import gc
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.frame.summary import aligned
from benchmarks.frame.units import number
from benchmarks.scale import processes

Sample = dict[str, float]


@dataclass(frozen=True)
class Kind:
    """A resource that must not grow.

    Attributes:
        unit: Text after the number.
        scale: Factor applied to the number when it is shown.
        slack: Growth that still counts as flat, caused by allocators and timing.
        bound: Value that may be reached at any time, early or late.
        is_time: Whether other programs may raise single values.
    """

    unit: str
    scale: float
    slack: float
    bound: float = 0
    is_time: bool = False


MIB = 1 << 20
KINDS = {
    "memory (resident, trimmed)": Kind("MiB", 1 / MIB, 3 * MIB),
    "memory (private)": Kind("MiB", 1 / MIB, 3 * MIB),
    "shared memory": Kind("MiB", 1 / MIB, 0.25 * MIB),
    "threads": Kind("", 1, 0, bound=21),  # threads start on demand
    "descriptors": Kind("", 1, 0),
    "objects of Weft": Kind("", 1, 20),
    "tensors": Kind("", 1, 20),
    "Python objects": Kind("", 1, 500),
}


_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 128 << 10


def return_large_blocks() -> None:
    """Has the allocator of this process give blocks of 128 KiB and more back as soon as they end.

    By default glibc learns from the first tensors that end to keep memory of their size: up to
    twice as much at the end of the arena of each thread, where ``malloc_trim`` does not find it. So
    the memory of a process grows until each of its arenas has had the largest tensor.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def take_sample() -> Sample:
    """Returns the resources that this process holds, after a garbage collection."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pid = os.getpid()
    memory = processes.memory_bytes(pid)
    counts = count_types()
    return {
        "memory (resident, trimmed)": _resident_bytes(pid),
        "memory (private)": memory.written,
        "shared memory": memory.shared,
        "threads": processes.threads(pid),
        "descriptors": len(processes.descriptors(pid)) - 1,  # one reads the folder
        "objects of Weft": sum(n for name, n in counts.items() if name.startswith("torchweft.")),
        "tensors": sum(n for name, n in counts.items() if name.startswith("torch.Tensor")),
        "Python objects": sum(counts.values()),
    }


def count_types() -> Counter[str]:
    """Returns the number of objects of each type that the garbage collector tracks."""
    kinds = Counter(map(type, gc.get_objects()))
    counts: Counter[str] = Counter()
    for kind, count in kinds.items():
        counts[f"{kind.__module__}.{kind.__qualname__}"] += count
    return counts


def _resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Course:
    """The samples of one kind of resource in one process.

    The first quarter is warm-up: pools fill, threads start. After that the highest value may
    not rise any more, so the last quarter's is compared with the second's. Of times it is the
    lowest value, which other programs disturb least; whatever grows raises it as well.
    """

    kind: Kind
    values: Sequence[float]

    @property
    def growth(self) -> float:
        quarter = max(1, len(self.values) // 4)
        extreme = min if self.kind.is_time else max
        return extreme(self.values[-quarter:]) - extreme(self.values[quarter : 2 * quarter])

    @property
    def is_flat(self) -> bool:
        return self.growth <= self.kind.slack or max(self.values) <= self.kind.bound

    def cells(self) -> list[str]:
        """Returns the start, the highest value, the end, the growth, and the verdict."""
        shown = [self.values[0], max(self.values), self.values[-1], self.growth]
        texts = [f"{number(value * self.kind.scale)} {self.kind.unit}".strip() for value in shown]
        return [*texts, "flat" if self.is_flat else "GROWS"]


def table(courses: Sequence[tuple[str, str, Course]]) -> list[str]:
    """Returns a table of courses, each with its process and kind."""
    lines = [
        "| process | what | first | highest | last | growth after warm-up | |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for process, kind, course in courses:
        lines.append("| " + " | ".join([process, kind, *course.cells()]) + " |")
    return aligned(lines)


def grown(before: dict[str, Counter[str]], after: dict[str, Counter[str]]) -> list[str]:
    """Returns the types whose number rose most, by process."""
    lines = []
    for process in after:
        for kind, count in (after[process] - before[process]).most_common(8):
            lines.append(f"- {process}: {kind}: {count:+}")
    return lines
