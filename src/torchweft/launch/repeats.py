"""Distinguishes a bug, which fails again at once, from a transient fault."""

from __future__ import annotations

import re

from torchweft.launch.report import error_line
from torchweft.launch.worker import WorkerExit

AT_ONCE_S = 10.0
"""A life shorter than this, in seconds, has made no progress."""

_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


class Repeats:
    """Remembers how short lives ended.

    Args:
        is_of_group: Whether the workers restart together, so that any of them may fail first.
    """

    def __init__(self, is_of_group: bool) -> None:
        self._is_of_group = is_of_group
        self._former: dict[str, str] = {}

    def is_repeated(self, ended: WorkerExit, tail: str) -> bool:
        """Whether a life failed at once, with the same traceback as the previous life.

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
