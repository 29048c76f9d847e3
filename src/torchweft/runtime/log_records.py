"""Gives each log record, also of the program, the worker and the call during which it was made.

Formats use ``%(weft_worker)s`` and ``%(weft_call)s``. Both are empty where there is none. Only the
making of a record costs anything: the call is in a context variable anyway.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple


class Origin(NamedTuple):
    """Where a record comes from.

    Attributes:
        worker: Name of the worker.
        call: The call of another worker that the code serves, as ``torchweft top`` names it.
    """

    worker: str = ""
    call: str = ""


_of_worker: Callable[[], Origin] | None = None


def origin() -> Origin:
    """Returns the worker and the call of the running code."""
    if _of_worker is None:  # It has not joined; its launcher has given it a name.
        return Origin(os.environ.get("WEFT_WORKER_NAME", ""))
    return _of_worker()


def set_origin(of_worker: Callable[[], Origin] | None) -> None:
    """Sets what returns the origin, once this process is a worker; None if it is none any more."""
    global _of_worker
    install()
    _of_worker = of_worker


def install() -> None:
    """Marks all records of this process from now on. Idempotent."""
    if not isinstance(logging.getLogRecordFactory(), _Factory):
        logging.setLogRecordFactory(_Factory(logging.getLogRecordFactory()))


class _Factory:
    """Makes records as the former factory does, and adds their origin."""

    def __init__(self, former: Callable[..., logging.LogRecord]) -> None:
        self._former = former

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._former(*args, **kwargs)
        record.weft_worker, record.weft_call = origin()
        return record
