"""Tells a bug, which fails again at once, from a fault that passes."""

from __future__ import annotations

import re

from torchweft.launch.report import error_line
from torchweft.launch.worker import WorkerExit

AT_ONCE_S = 10.0
"""A life that was as short has made no progress."""

_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


class Repeats:
    """Remembers how lives ended that were short.

    Args:
        is_of_group: Whether the workers begin anew together, so that any of them may fail first.
    """

    def __init__(self, is_of_group: bool) -> None:
        self._is_of_group = is_of_group
        self._former: dict[str, str] = {}

    def is_repeated(self, ended: WorkerExit, tail: str) -> bool:
        """Whether a life failed at once, and by the same traceback as the one before.

        Args:
            ended: How it ended.
            tail: The last lines that it wrote to standard error.
        """
        key = "" if self._is_of_group else ended.name
        is_short = ended.exit_code > 0 and ended.ran_s < AT_ONCE_S and error_line(tail)
        signature = _VARYING.sub("#", tail) if is_short else ""
        former = self._former.get(key)
        self._former[key] = signature
        return bool(signature) and signature == former
