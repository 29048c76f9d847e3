"""Checks the limits of each host: descriptors, shared memory, reading of memory; pure."""

from __future__ import annotations

from collections.abc import Iterator

from torchweft.observe.doctor.findings import Finding, Level
from torchweft.protocol.observing.facts import HostFacts

LEAST_DESCRIPTORS = 1024
LEAST_SHM_BYTES = 1 << 30
_MEBIBYTE = 1 << 20


def check_descriptors(facts: HostFacts, workers: int) -> Iterator[Finding]:
    """Yields whether a worker may open enough files: several for each other worker."""
    needed = max(LEAST_DESCRIPTORS, 64 + 8 * workers)
    if facts.descriptors < 0 or facts.descriptors >= needed:
        return
    text = f"may have {facts.descriptors} descriptors open, and needs {needed}"
    yield Finding(Level.ERROR, "descriptors", facts.worker, text, f"ulimit -n {needed}")


def check_shm(facts: HostFacts) -> Iterator[Finding]:
    """Yields whether ``/dev/shm`` is large enough for those that use it."""
    if facts.shm_bytes >= LEAST_SHM_BYTES:
        return
    text = (
        f"/dev/shm has {facts.shm_bytes // _MEBIBYTE} MiB: data loaders and torch.multiprocessing "
        "keep tensors there (Weft does not)"
    )
    fix = "docker run --shm-size=2g, or mount -o remount,size=2g /dev/shm"
    yield Finding(Level.ERROR, "/dev/shm", facts.host, text, fix)


def check_ptrace(facts: HostFacts) -> Iterator[Finding]:
    """Yields whether workers may read one another's memory."""
    if facts.ptrace_scope <= 0:
        return
    text = (
        f"ptrace_scope is {facts.ptrace_scope}: workers that are not parent and child may not read "
        "one another's memory, so tensors that find no room in shared memory go through sockets"
    )
    fix = "sysctl kernel.yama.ptrace_scope=0"
    yield Finding(Level.NOTE, "ptrace", facts.host, text, fix)
