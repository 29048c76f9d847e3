"""A rendezvous store whose every operation ends within a time limit.

PyTorch's stores wait without a limit if their host accepts a connection but never answers: the host
is stopped or hangs, or another program listens there. Such an operation cannot be aborted. So each
operation runs in a thread of its own, which is abandoned when the time is up. After that the store
is not asked again.
"""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

# PyTorch's own types leave some of these out, as a build may lack them.
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    TCPStore,
)

from torchweft.errors import RendezvousTimeout

T = TypeVar("T")

_LATE_S = 2.0
"""Grace period for an answer after the limit, since some stores count in whole seconds."""


def within(limit_s: float, place: str, operation: Callable[[], T]) -> T:
    """Runs a store operation and returns its result. Blocks for about ``limit_s`` at most.

    Args:
        limit_s: How long the operation may take, in seconds.
        place: Where the store is, for the error.
        operation: Called in a thread of its own; must not hold the interpreter lock as it waits.

    Raises:
        RendezvousTimeout: There was no answer in time.
        Exception: The exception of the operation.
    """
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((operation(), None))
        except BaseException as error:
            outcome.put((None, error))

    thread = threading.Thread(target=run, name="weft-store", daemon=True)
    began_s = time.monotonic()
    thread.start()
    try:
        value, error = outcome.get(timeout=max(limit_s, 0.0) + _LATE_S)
    except queue.Empty:
        raise _silent(place, time.monotonic() - began_s) from None
    thread.join()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _silent(place: str, waited_s: float) -> RendezvousTimeout:
    return RendezvousTimeout(
        f"the rendezvous store at {place} does not answer for {waited_s:.1f} s, though something "
        "takes connections there: the process that hosts it (rank 0, or its launcher) is stopped, "
        "its host hangs, or another program has that port. See what runs there, or choose another "
        "port (MASTER_PORT)",
        missing=(0,),
        elapsed_s=waited_s,
    )


def place_of(store: Any) -> str:
    """Returns the address or the file of a store, for messages."""
    store = _underlying(store)
    if isinstance(store, TCPStore):
        return f"{store.host}:{store.port}"
    if isinstance(store, FileStore):
        return f"file {store.path}"  # type: ignore[attr-defined]
    return f"a {type(store).__name__}"


def host_of(store: Any) -> str:
    """Returns the host of a TCP store, as it was named; empty for other stores."""
    store = _underlying(store)
    return str(store.host) if isinstance(store, TCPStore) else ""


def _underlying(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


class BoundedStore:
    """Forwards all operations to another store, and bounds the wait for its answers.

    Each operation raises RendezvousTimeout if the store does not answer in time, and at once after
    the first such failure.

    Args:
        store: A ``torch.distributed.Store``.
        limit_s: Seconds from now by which all operations must end. Later operations get only a
            short grace period.
    """

    def __init__(self, store: Any, limit_s: float) -> None:
        self._store = store
        self._end_s = time.monotonic() + limit_s
        self._place = place_of(store)
        self._silent: RendezvousTimeout | None = None

    def set(self, key: str, value: str | bytes) -> None:
        self._within(0.0, lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return bytes(self._within(0.0, lambda: self._store.get(key)))

    def add(self, key: str, amount: int) -> int:
        return int(self._within(0.0, lambda: self._store.add(key, amount)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._within(0.0, lambda: self._store.check(list(keys))))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._within(0.0, lambda: self._store.compare_set(key, expected, desired)))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Waits for keys; ``timeout`` may end after the deadline of the other operations."""
        least_s = timeout.total_seconds()
        self._within(least_s, lambda: self._store.wait(list(keys), timeout))

    def _within(self, least_s: float, operation: Callable[[], T]) -> T:
        if self._silent is not None:
            raise copy.copy(self._silent)
        limit_s = max(self._end_s - time.monotonic(), least_s)
        try:
            return within(limit_s, self._place, operation)
        except RendezvousTimeout as error:
            self._silent = error
            raise
