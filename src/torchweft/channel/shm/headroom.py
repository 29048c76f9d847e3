"""How much memory this process may still take before the kernel begins to kill.

Shared memory is charged to the container's limit as it is touched, and there is no error at the
limit: the kernel kills a process of the container. So the memory left is looked up beforehand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")

_NO_LIMIT = sys.maxsize


def available_bytes() -> int:
    """Returns how much memory is left, by the machine and by every limit that applies."""
    return min(_on_machine(MEMINFO), *_within_limits(OWN_GROUPS, GROUPS), _NO_LIMIT)


def _on_machine(meminfo: Path) -> int:
    for line in _text(meminfo).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    return _NO_LIMIT


def _within_limits(own_groups: Path, groups: Path) -> Iterator[int]:
    for line in _text(own_groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left(groups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _left(root, path, *names)


def _left(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """Yields the memory left in a control group and in each visible ancestor of it."""
    group = root / path.lstrip("/")
    for each in (group, *group.parents):
        limit_bytes = _number(each / limit)
        if limit_bytes is not None:
            used_bytes = _number(each / usage) or 0
            yield max(limit_bytes - used_bytes + _statistic(each, reclaimable), 0)
        if each == root:
            return


def _statistic(group: Path, name: str) -> int:
    for line in _text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None  # "max" means no limit


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
