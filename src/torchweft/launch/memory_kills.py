"""Detects whether the kernel has killed for lack of memory: a ``SIGKILL`` itself does not tell.

Control groups count such kills: ``oom_kill`` in ``memory.events`` of version 2, and in
``memory.oom_control`` of version 1. Workers are in the group of their launcher.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_COUNTER = "oom_kill"


class MemoryKills:
    """Watches the counter of this process's control group.

    Args:
        mount: Where control groups are mounted.
        membership: The file that names the control groups of this process.
    """

    def __init__(
        self,
        mount: Path = Path("/sys/fs/cgroup"),
        membership: Path = Path("/proc/self/cgroup"),
    ) -> None:
        self._file = next(
            (file for file in _candidates(mount, membership) if _read(file) is not None), None
        )
        self._seen = 0 if self._file is None else _read(self._file) or 0

    def take_one(self) -> bool | None:
        """Returns whether there was a kill not yet returned here; None if that is unknown.

        Call it once for each killed process: the kernel may kill several at a time.
        """
        count = None if self._file is None else _read(self._file)
        if count is None:
            return None
        is_new = count > self._seen
        self._seen += is_new
        return is_new


def _candidates(mount: Path, membership: Path) -> Iterator[Path]:
    """Returns the possible paths of the counter.

    In a container, the group's path may be a path of the host, which is not visible there. The
    container's group is then at the mount itself.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.oom_control"
        elif not controllers:
            root, name = mount, "memory.events"
        else:
            continue
        yield root / path.lstrip("/") / name
        yield root / name


def _read(file: Path) -> int | None:
    try:
        fields = (line.split() for line in file.read_text().splitlines())
        return next(int(value) for name, value in fields if name == _COUNTER)
    except (OSError, ValueError, StopIteration):
        return None
