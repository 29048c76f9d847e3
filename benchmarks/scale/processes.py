"""The resources that a process holds and has used, as the kernel reports them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.frame.work import process_clock


class Memory(NamedTuple):
    """Memory of a process in bytes.

    Attributes:
        pss: Memory that it uses, a page shared by n processes counted as an nth.
        private: Memory that no other process uses.
        written: The part of it that does not have the content of a file. The rest changes with
            the other processes that use the same libraries.
        shared: Pages in shared memory (``/dev/shm``, memfd) that it has mapped and touched.
    """

    pss: int
    private: int
    written: int
    shared: int


def memory_bytes(pid: int) -> Memory:
    """Returns the memory of a process."""
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split(":")
        sizes[name] = int(size.split()[0]) * 1024
    written = sizes["Private_Dirty"]
    private = sizes["Private_Clean"] + written
    return Memory(sizes["Pss"], private, written, sizes.get("Pss_Shmem", 0))


def threads(pid: int) -> int:
    """Returns the number of threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))


def sockets(pid: int) -> int:
    """Returns the number of open sockets of a process."""
    return sum(target.startswith("socket:") for target in descriptors(pid))


def descriptors(pid: int) -> list[str]:
    """Returns the target of each open descriptor of a process."""
    folder = f"/proc/{pid}/fd"
    targets = []
    for name in os.listdir(folder):
        try:
            targets.append(os.readlink(f"{folder}/{name}"))
        except FileNotFoundError:  # closed meanwhile, such as the one that reads this folder
            continue
    return targets


def cpu_s(pids: Iterable[int]) -> float:
    """Returns the CPU time that processes have used so far, all threads."""
    return sum(time.clock_gettime(process_clock(pid)) for pid in pids)
