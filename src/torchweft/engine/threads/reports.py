"""Reports: exceptions that the program raises, waits that take long, and rare events.

A long wait is reported once, with the workers for which this worker waits. Waiting code pays
nothing for that: it registers where its open waits are found, and the timer thread goes through
them. Before that thread exists, while the workers of a group find each other, the waiting loop asks
a ``Notice``.

Each log record, also of the program, has the worker and the call during which it was made, from the
import of this module on. Formats use ``%(weft_worker)s`` and ``%(weft_call)s``. Both are empty
where there is none. Only the making of a record costs anything: the call is in a context variable
anyway.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from torchweft import knobs
from torchweft.columns import LAYOUT, printable
from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.free_threading import copy_of, shared_count

_log = logging.getLogger("torchweft")
_NAMED_LIMIT = 8


def _escape(record: logging.LogRecord) -> bool:
    """Escapes what others have put into a record to control a terminal; a filter of the log."""
    with contextlib.suppress(Exception):  # An argument's own code raises: the handlers tell.
        text = record.getMessage()
        shown = printable(text, LAYOUT)
        if shown != text:
            record.msg, record.args = shown, ()
        if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
            text = logging.Formatter().formatException(record.exc_info)
            shown = printable(text, LAYOUT)
            if shown != text:
                record.exc_text = shown
    return True


_log.addFilter(_escape)


def log_exception(text: str, *values: object) -> None:
    """Logs the exception that is being handled; raises nothing itself.

    But an exception of a signal handler is the program's: it is raised on.

    Formatting an exception runs its ``__str__`` and ``__dir__``, and log handlers are the
    program's own. Neither may end a thread that serves others.

    Args:
        text: The message, as for ``logging``.
        values: The values that are put into the text.
    """
    kind, error, _ = sys.exc_info()
    if error is not None and is_of_handler(error):
        raise error
    try:
        _log.exception(text, *values)
    except BaseException as failure:
        # Logging itself failed: only the standard error stream is left.
        with contextlib.suppress(BaseException):
            name, reason = getattr(kind, "__name__", "?"), type(failure).__name__
            print(f"weft: {text}: {name}; logging it raised {reason}", file=sys.stderr)


class Lacking(NamedTuple):
    """What a wait lacks, as text, and the names of the workers that it waits for."""

    text: str
    workers: tuple[str, ...] = ()


Following = Callable[[Callable[[], Lacking]], contextlib.AbstractContextManager[object]]
"""Follows a shutdown within a ``with`` block; its argument returns what the shutdown lacks."""


class OpenWait(NamedTuple):
    """A wait that has not ended.

    Attributes:
        key: Identifies the wait.
        since_s: When it began, by ``time.monotonic``.
        describe: Returns the place and the workers: ``"in barrier for 'worker1'"``.
    """

    key: object
    since_s: float
    describe: Callable[[], str]


Source = Callable[[], Iterable[OpenWait]]


class Notice:
    """One wait of a worker, reported when it has taken ``WEFT_WAIT_NOTICE_S``; not thread-safe.

    Args:
        subject: The subject of the message: the waiting worker.
        describe: As in ``OpenWait``.
    """

    def __init__(self, subject: str, describe: Callable[[], str]) -> None:
        self._subject = subject
        self._describe = describe
        self._since_s = time.monotonic()
        self._due_s = self._since_s + notice_s()

    def left_s(self) -> float:
        """Returns the seconds until the wait is reported; infinite when it has been."""
        return self._due_s - time.monotonic()

    def look(self) -> None:
        """Reports the wait if it is due."""
        if self.left_s() <= 0:
            self._due_s = math.inf
            _tell(self._subject, self._since_s, self._describe)


class LongWaits:
    """The long waits of one worker. Thread-safe.

    Args:
        worker: The worker's name.
    """

    def __init__(self, worker: str) -> None:
        self._subject = subject_of(worker)
        self._after_s = notice_s()
        self._sources: list[Source] = [lambda: list(self._during.values())]
        self._during: dict[object, OpenWait] = {}
        self._numbers = shared_count()
        self._told: set[object] = set()
        self.on_notice: Callable[[str], object] = lambda text: None
        """Called with each message as well."""

    def add(self, source: Source) -> None:
        """Adds waits to report; ``source`` is called by another thread than the waiting ones."""
        self._sources.append(source)

    @contextlib.contextmanager
    def during(self, describe: Callable[[], str]) -> Iterator[None]:
        """Reports the ``with`` block if it takes long."""
        key = next(self._numbers)
        self._during[key] = OpenWait(key, time.monotonic(), describe)
        try:
            yield
        finally:
            del self._during[key]

    def during_shutdown(
        self, lacking: Callable[[], Lacking]
    ) -> contextlib.AbstractContextManager[None]:
        """Reports a shutdown if it takes long."""
        return self.during(lambda: f"in shutdown, serving meanwhile: {lacking().text}")

    def tick(self, now_s: float) -> float:
        """Reports the waits that are due; a job of the timers."""
        waits = [wait for source in self._sources for wait in _waits_of(source)]
        self._told.intersection_update([wait.key for wait in waits])
        due = [wait for wait in waits if now_s - wait.since_s >= self._after_s]
        for wait in due:
            if wait.key not in self._told:
                self._told.add(wait.key)
                try:
                    self.on_notice(_tell(self._subject, wait.since_s, wait.describe))
                except Exception:  # The other waits are reported nevertheless.
                    log_exception("a long wait could not be described")
        untold = [wait.since_s for wait in waits if wait.key not in self._told]
        return min(untold, default=math.inf) + self._after_s


def _waits_of(source: Source) -> Iterable[OpenWait]:
    try:
        return source()
    except Exception:
        log_exception("some waits cannot be told")
        return ()


def subject_of(worker: str) -> str:
    """Returns a worker's name as the subject of a message."""
    return f"worker {worker!r}"


def notice_s() -> float:
    """Returns after how many seconds a wait is reported."""
    return knobs.WAIT_NOTICE_S.get() or math.inf


def names_of(workers: Collection[str]) -> str:
    """Returns the names of workers for a message, the first few of them."""
    return f"worker{'s' if len(workers) > 1 else ''} {first_names(workers)}"


def first_names(workers: Iterable[str]) -> str:
    """Returns the distinct names of workers for a message, the first few of them."""
    distinct = list(dict.fromkeys(workers))
    more = len(distinct) - _NAMED_LIMIT
    text = ", ".join(map(repr, distinct[:_NAMED_LIMIT]))
    return f"{text} and {more} more" if more > 0 else text


def _tell(subject: str, since_s: float, describe: Callable[[], str]) -> str:
    waited_s = time.monotonic() - since_s
    text = f"{subject} has waited {waited_s:.0f} s {describe()}"
    _log.warning("%s", text)
    return text


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


install()

KEPT = 200


class Events:
    """The last events of one worker. Thread-safe: one ``append`` for each."""

    def __init__(self) -> None:
        self._noted: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=KEPT)

    def note(self, text: str, *values: object) -> None:
        """Notes an event.

        Args:
            text: What has happened, as a format of ``%``.
            values: Numbers and texts, which are put into the text when somebody asks.
        """
        self._noted.append((time.monotonic(), text, values))

    def all(self) -> list[tuple[float, str]]:
        """Returns the events, the oldest first, each with its time by ``time.monotonic``."""
        return [(at_s, text % values) for at_s, text, values in copy_of(self._noted)]
