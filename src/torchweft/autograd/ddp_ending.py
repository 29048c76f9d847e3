"""Frees modules under ``DistributedDataParallel`` without a deadlock.

The problem: after ``destroy_process_group()``, DDP's reducer may be the last owner of the process
group. It frees the group while it holds the interpreter lock, and freeing waits for the group's
threads. One of those threads may be waiting for the lock, to free a tensor that was just reduced.
The other threads of a worker make this rare deadlock likely.

The idea: the group's Python object releases the lock while it waits. So it must be freed last.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Any

_former: list[object] = []


def keep_group_of(module: Any) -> None:
    """Keeps the process group of a module alive until the module's reducer is freed."""
    ending = weakref.finalize(module, _former.append, module.process_group)
    ending.atexit = False


def release_groups() -> None:
    """Releases the process groups of freed modules."""
    _former.clear()


atexit.register(release_groups)
