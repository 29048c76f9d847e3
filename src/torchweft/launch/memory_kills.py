"""Tells whether the kernel has killed for want of memory: a ``SIGKILL`` itself does not say.

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
        mount: Where control groups are found.
        membership: The file that names those of this process.
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
        """Whether there was such a kill that was not told of yet; None where that is not known.

        Ask once for each process that was killed: the kernel may kill several at a time.
        """
        count = None if self._file is None else _read(self._file)
        if count is None:
            return None
        is_new = count > self._seen
        self._seen += is_new
        return is_new


def _candidates(mount: Path, membership: Path) -> Iterator[Path]:
    """Returns where the counter may be.

    Within a container the path of the group may be one of the host, which is not seen there: the
    group of the container then stands at the mount itself.
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
