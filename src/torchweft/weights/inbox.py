"""The subscribers of this worker, by key: where publishers' announcements arrive."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from torchweft.free_threading import shared_count
from torchweft.rpc.current_call import caller, check_types
from torchweft.weights.versions import Version


class Told(Protocol):
    """A subscriber that is told of versions."""

    def follows(self, worker: int) -> bool:
        """Returns whether it follows a publisher of a worker, by id, or asks to do so."""

    def announced(self, version: Version) -> None:
        """The publisher has a version. Does not block."""


_told: weakref.WeakValueDictionary[int, Told] = weakref.WeakValueDictionary()
_keys = shared_count(1)
_lock = threading.Lock()


def enter(subscriber: Told) -> int:
    """Adds a subscriber, for as long as it lives; returns its key on this worker."""
    with _lock:
        key = next(_keys)
        _told[key] = subscriber
    return key


def leave(key: int) -> None:
    """Removes a subscriber."""
    with _lock:
        _told.pop(key, None)


def announce(key: int, version: Version) -> bool:
    """Tells a subscriber of a version of the caller; returns whether it follows the caller.

    A publisher that it follows no more has not been told yet: that is no error.
    """
    check_types(key=(key, int), version=(version, Version))
    with _lock:
        subscriber = _told.get(key)
    if subscriber is None or not subscriber.follows(caller().id):
        return False
    subscriber.announced(version)
    return True
