"""Puts subclasses in the place of the types of calls while somebody watches the calls of a worker.

A call is an object, and its type is looked up where it is made. So while nobody watches, nothing
of a watcher is in the way of a call. Watchers are counters and traces; both may watch at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torchweft.agent.calls import PendingCall
from torchweft.ids import ReferenceId
from torchweft.rpc.completion import Call, CallWithCode
from torchweft.rpc.serving import ServedTypes
from torchweft.rpc.worker import Worker


class Watcher(NamedTuple):
    """Derives the types of watched calls.

    Attributes:
        pending: Returns a subclass of a type of calls that this worker makes.
        served: Returns a subclass of a type of calls that it serves.
        note_creation: Called for each call that makes a value, with its function and reference.
        is_brief: Whether it makes new types each time. They derive from those of the others.
    """

    pending: Callable[[type[PendingCall]], type[PendingCall]]
    served: Callable[[type[Any]], type[Any]]
    note_creation: Callable[[Any, ReferenceId], None]
    is_brief: bool = False


class Watching:
    """The watchers of one worker's calls. Thread-safe.

    Args:
        worker: The worker.
        served: The types of its served calls.
    """

    def __init__(self, worker: Worker, served: ServedTypes) -> None:
        self._worker = worker
        self._served = served
        self._lock = threading.Lock()
        self._watchers: list[Watcher] = []

    def begin(self, watcher: Watcher) -> None:
        """Has all calls that are made or read from now on watched."""
        with self._lock:
            self._watchers.append(watcher)
            self._watchers.sort(key=lambda each: each.is_brief)
            self._use()

    def end(self, watcher: Watcher) -> None:
        """Has no further calls watched; nothing if the watcher does not watch."""
        with self._lock:
            if watcher in self._watchers:
                self._watchers.remove(watcher)
                self._use()

    def _use(self) -> None:
        pending: type[PendingCall] = PendingCall
        plain, with_code = Call, CallWithCode
        for watcher in self._watchers:
            pending = watcher.pending(pending)
            plain, with_code = watcher.served(plain), watcher.served(with_code)
        notes = [watcher.note_creation for watcher in self._watchers]
        self._worker.call_type = pending
        self._worker.note_creation = _all_of(notes) if len(notes) > 1 else next(iter(notes), None)
        self._served.use(plain, with_code)


def _all_of(
    notes: list[Callable[[Any, ReferenceId], None]],
) -> Callable[[Any, ReferenceId], None]:
    def note(function: Any, reference: ReferenceId) -> None:
        for each in notes:
            each(function, reference)

    return note
