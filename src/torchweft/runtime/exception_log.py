"""Logging of exceptions that code of the program has raised, whose own code may raise as well."""

from __future__ import annotations

import contextlib
import logging
import sys

_log = logging.getLogger("torchweft")


def log_exception(text: str, *values: object) -> None:
    """Logs the exception that is being handled; raises nothing itself.

    Formatting an exception runs its ``__str__`` and ``__dir__``, and handlers of the log are the
    program's own. Neither may end a thread that serves others.

    Args:
        text: What failed, as for ``logging``.
        values: What is put into the text.
    """
    kind = sys.exc_info()[0]
    try:
        _log.exception(text, *values)
    except BaseException as failure:
        # The log does not work: the standard error stream is all that is left.
        with contextlib.suppress(BaseException):
            name, reason = getattr(kind, "__name__", "?"), type(failure).__name__
            print(f"weft: {text}: {name}; logging it raised {reason}", file=sys.stderr)
