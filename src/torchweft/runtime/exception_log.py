"""Logs exceptions raised by the program, whose own code may raise while they are logged."""

from __future__ import annotations

import contextlib
import logging
import sys

_log = logging.getLogger("torchweft")


def log_exception(text: str, *values: object) -> None:
    """Logs the exception that is being handled; raises nothing itself.

    Formatting an exception runs its ``__str__`` and ``__dir__``, and log handlers are the
    program's own. Neither may end a thread that serves others.

    Args:
        text: The message, as for ``logging``.
        values: The values that are put into the text.
    """
    kind = sys.exc_info()[0]
    try:
        _log.exception(text, *values)
    except BaseException as failure:
        # Logging itself failed: only the standard error stream is left.
        with contextlib.suppress(BaseException):
            name, reason = getattr(kind, "__name__", "?"), type(failure).__name__
            print(f"weft: {text}: {name}; logging it raised {reason}", file=sys.stderr)
