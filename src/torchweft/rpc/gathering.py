"""One gathering of ``collective``: its name, its limits, its outcome, and its state on a worker."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torchweft.protocol.observing.keys import GATHERING, Wait
from torchweft.rpc.futures import Future
from torchweft.serialize.registry import rebuilds_plain
from torchweft.threads import device_streams
from torchweft.threads.device_streams import Mark
from torchweft.worker.agent import Agent


@rebuilds_plain
class Key(NamedTuple):
    """Names a gathering.

    Attributes:
        workers: The ids of the participants, lowest first.
        kind: The name of the operation; see ``Ways``.
        number: How many gatherings of that kind the workers had before.
    """

    workers: tuple[int, ...]
    kind: str
    number: int


class Ways(NamedTuple):
    """The name of a gathering in messages, and the functions that it calls on other workers."""

    name: str
    bring: Callable[[Any, str, Any], None]
    """Called on the leader with the key, the name of the caller and its value."""
    tell: Callable[[Any, dict[str, Any]], None]
    """Called on all other workers with the key and all values."""


class Limits(NamedTuple):
    """Limits in seconds: for each call (0 for no limit), and for all workers to arrive."""

    call_s: float
    all_s: float


class Outcome(NamedTuple):
    """The result of a gathering.

    Attributes:
        values: The values by worker name.
        calls: The leader's calls that send the values, by worker name. Until they have ended, the
            values must not be changed.
    """

    values: dict[str, Any]
    calls: dict[str, Future[None]]


class Gathering:
    """One gathering, as one of its workers knows it.

    Attributes:
        gathered_objects: The values by worker name; on the leader, those that have arrived.
        proceed_signal: Set when the gathering has ended.
        error: The reason if the gathering has failed, else None.
        missing: On the leader, ids of the workers that have not arrived and are not lost.
        began_s: When this worker first knew of it, by ``time.monotonic``.
    """

    def __init__(self, missing: Iterable[int] = ()) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()
        self.error: Exception | None = None
        self.missing = set(missing)
        self.began_s = time.monotonic()
        self._marks: list[Mark] = []
        self._lock = threading.RLock()

    @property
    def has_ended(self) -> bool:
        """Whether all workers have arrived, or the gathering has failed."""
        return self.proceed_signal.is_set()

    def end(self, values: dict[str, Any]) -> None:
        """Ends the gathering with all values; does nothing if it has ended."""
        with self._lock:
            if not self.has_ended:
                self.gathered_objects = values
                self.note_work()
                self.proceed_signal.set()

    def fail(self, error: Exception) -> None:
        """Fails the gathering and drops its values; does nothing if it has ended."""
        with self._lock:
            if not self.has_ended:
                self.error = error
                self.gathered_objects = {}
                self.proceed_signal.set()

    def wait(self, agent: Agent, key: Key, limit_s: float) -> bool:
        """Blocks until the gathering has ended, at most ``limit_s``; returns whether it has."""

        def parts() -> list[Wait]:
            names = tuple(agent.peers[each].name for each in key.workers)
            text = f"{key.kind} {key.number} of {' '.join(names)}"
            wait = Wait(GATHERING, text, time.monotonic() - self.began_s, key.kind, names)
            return [] if self.has_ended else [wait]

        with agent.reactor.waiting(parts):
            return self.proceed_signal.wait(None if math.isinf(limit_s) else limit_s)

    def values(self) -> dict[str, Any]:
        """Returns the values of an ended gathering, or raises its error."""
        if self.error is not None:
            raise copy.copy(self.error)  # Several threads may raise it: keep tracebacks apart.
        for mark in self._marks:
            device_streams.use(mark, self.gathered_objects)
        return self.gathered_objects

    def note_work(self) -> None:
        """Has the reader of the values wait for the GPU work of this thread, which made some."""
        mark = device_streams.mark() if device_streams.HAS_CUDA else None
        if mark is not None:
            self._marks.append(mark)
