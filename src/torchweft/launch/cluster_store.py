"""The stores in which the workers of a cluster meet, and who has joined.

On one host, the store is a file in a private directory; on several, a TCP store in the caller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

# PyTorch's own types leave these out, as a build may lack them.
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from torchweft import extending
from torchweft.errors import CallTimeout, LaunchError, UnknownWorker, WorkerLost
from torchweft.secret import Secret

if TYPE_CHECKING:
    from torchweft.rpc import RpcBackendOptions

WATCH_S = 0.05
"""Seconds between checks whether a wait still makes sense."""

joined = threading.Event()
"""Is set once all workers that were present know this one, which serves calls before."""


@extending.remotely_callable
def has_joined() -> bool:
    """Returns whether all workers that were present know this worker, one of a cluster."""
    return joined.is_set()


def is_present(name: str, timeout_s: float) -> bool:
    """Whether this process and the other workers know a worker of a cluster, which lives. Blocks.

    Args:
        name: The worker's name.
        timeout_s: Seconds that it has to answer.
    """
    try:
        worker = extending.find_worker(name)
        if worker.lost is not None:
            return False
        return bool(extending.start_call(worker, has_joined, timeout=timeout_s).wait())
    except (CallTimeout, UnknownWorker, WorkerLost):
        return False  # It has not come, has ended, or is stopped.


class ClusterStore(Store):
    """Delegates to another store, for the caller of a cluster, who hears of workers that fail.

    It waits in short steps: PyTorch's stores wait in one call, which neither a dead worker nor
    Ctrl-C interrupts.

    Keep a reference to it for as long as it is used: a PyTorch store that wraps it keeps only its
    C++ half alive.

    Args:
        store: Where the keys are kept.
        failure: Returns the error that makes waiting useless, or None.
    """

    def __init__(self, store: Any, failure: Callable[[], LaunchError | None]) -> None:
        super().__init__()
        self._store = store
        self._failure = failure

    def set(self, key: str, value: str) -> None:
        """Sets a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Returns the value of a key, which must exist."""
        return bytes(self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta = timedelta.max) -> None:
        """Waits until all keys exist.

        Raises:
            RuntimeError: They were not set in time, or a worker has ended.
        """
        left_s = timeout.total_seconds()
        while True:
            failure = self._failure()
            if failure is not None:
                raise failure
            step_s = min(WATCH_S, left_s)
            try:
                self._wait_a_step(keys, max(step_s, 0.001))
                return
            except RuntimeError:
                left_s -= step_s
                if left_s <= 0:
                    raise

    def _wait_a_step(self, keys: list[str], step_s: float) -> None:
        """Waits until all keys exist; raises RuntimeError if they do not in time."""
        if not isinstance(self._store, TCPStore):
            self._store.wait(keys, timedelta(seconds=step_s))
            return
        # PyTorch's client logs a warning for each wait that ends without the keys.
        if not self._store.check(keys):
            time.sleep(step_s)
            raise RuntimeError(f"{', '.join(keys)} not set within {step_s:.3f} s")


def meet(options: RpcBackendOptions, rendezvous: str, world_size: int | None) -> None:
    """Sets where a worker meets its group; on another host, its secret as well.

    Args:
        options: The worker's options, which are changed.
        rendezvous: A file, or the TCP store in the caller, as an init method.
        world_size: Workers in the group; None for an open group.
    """
    place = urlsplit(rendezvous)
    if place.hostname is not None and place.port is not None:
        limit = timedelta(seconds=options.init_timeout)
        options.store = TCPStore(place.hostname, place.port, is_master=False, timeout=limit)
        # With a secret it listens at its own address towards the store.
        options.secret, options.listen = Secret.from_environment(), ""
    elif world_size is None:
        options.init_method = rendezvous
    else:
        options.store = FileStore(rendezvous.removeprefix("file://"), world_size)
