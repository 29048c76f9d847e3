"""Lets modules under ``DistributedDataParallel`` end without hanging the process.

The problem: the last owner of a process group may be DDP's reducer, after
``destroy_process_group()``. It lets go of the group while it holds the interpreter lock, which
waits for the group's threads; and one of those may be waiting for the lock, to let go of a tensor
that was just reduced. The other threads of a worker make that likely where it was rare.

The idea: the group's own Python object gives the lock up while it waits. So that one has to go
last.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Any

_former: list[object] = []


def keep_group_of(module: Any) -> None:
    """Has the process group of a module outlive the module's reducer."""
    ending = weakref.finalize(module, _former.append, module.process_group)
    ending.atexit = False


def release_groups() -> None:
    """Lets go of the process groups of modules that are gone."""
    _former.clear()


atexit.register(release_groups)
