"""What a worker holds of collections, by their names: shards, or the aggregator of a group."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from torchweft.errors import ConfigurationError, WorkerLost
from torchweft.rpc import get_worker_info, on_worker_lost
from torchweft.rpc.current_call import caller, check_types


class Listener(Protocol):
    """Something that waits for other workers."""

    def worker_lost(self, error: WorkerLost) -> None:
        """Fails what waits for a lost worker, if that takes part here."""


class Part(Listener, Protocol):
    """What a worker holds of a collection."""

    uses: Counter[int]
    """How often each worker uses it, by id."""


P = TypeVar("P", bound=Part)


class Named(Generic[P]):
    """Parts of collections on this worker, by name. Thread-safe.

    A part is told of lost workers. Its users hold it by references; the registry does not.

    Args:
        problem: What a worker does not do that has no part of a name, such as "aggregates no".
        reason: Why it may have none.
    """

    def __init__(self, problem: str, reason: str) -> None:
        self._problem = problem
        self._reason = reason
        self._parts: weakref.WeakValueDictionary[str, P] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def use(self, name: str, make: Callable[[], P], fits: Callable[[P], bool]) -> tuple[P, bool]:
        """Returns the part of a name, made if there is none, and whether it fits its new user.

        The caller of the served call uses it once more if it fits; see ``release``.
        """
        check_types(name=(name, str))
        with self._lock:
            part = self._parts.get(name)
            if part is None:
                part = self._parts[name] = make()
                tell_losses(part)
            is_fit = fits(part)
            if is_fit:
                part.uses[caller().id] += 1
        return part, is_fit

    def release(self, name: str) -> None:
        """Ends one use by the caller; after the last one of all workers, the name is free.

        Raises:
            ConfigurationError: There is no part of this name, or the caller does not use it.
        """
        with self._lock:
            part = self.find(name)
            user = caller()
            if not part.uses[user.id]:
                raise ConfigurationError(
                    f"worker {user.name!r} does not use tables {name!r} on worker "
                    f"{get_worker_info().name!r}, and cannot close them for the workers that do"
                )
            part.uses[user.id] -= 1
            part.uses = +part.uses
            if not part.uses:
                del self._parts[name]

    def find(self, name: str) -> P:
        """Returns the part of a name.

        Raises:
            ConfigurationError: There is none.
        """
        check_types(name=(name, str))
        part = self._parts.get(name)
        if part is None:
            raise ConfigurationError(
                f"worker {get_worker_info().name!r} {self._problem} tables under the name "
                f"{name!r}; {self._reason}"
            )
        return part


def tell_losses(part: Listener) -> None:
    """Has lost workers told to an object as long as it lives; it is not kept for that."""
    reference = weakref.ref(part)

    def call(error: WorkerLost) -> None:
        found = reference()
        if found is not None:
            found.worker_lost(error)

    weakref.finalize(part, on_worker_lost(call))
