"""What trainers of a collection meet at: an object of one name, at which they push their steps.

Its users hold it by references, so it lives as long as one of them does. The name is free when all
of them have closed it. A push is answered when its trainer may go on, or fails with the loss of the
worker that it waits for.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch

from torchweft.embedding.errors import StepError
from torchweft.embedding.steps import Steps
from torchweft.errors import ConfigurationError, WorkerLost
from torchweft.extending import caller, check_caller, check_types, tell_losses
from torchweft.rpc import expose, get_worker_info

M = TypeVar("M", bound="Meeting[Any]")
P = TypeVar("P")
_lock = threading.Lock()


class Meeting(Generic[P]):
    """An object of a collection that several workers use. Thread-safe, if its subclass is.

    Args:
        name: Name of the collection.
        steps: The steps of those who push.
        pushers: By position in the steps, the workers of which the first one pushes.
    """

    named: ClassVar[weakref.WeakValueDictionary[str, Any]]
    """The objects of a class on this worker, by name."""

    def __init_subclass__(cls) -> None:
        cls.named = weakref.WeakValueDictionary()

    def __init__(self, name: str, steps: Steps[P], pushers: Sequence[Sequence[str]]) -> None:
        self.name = name
        self.steps = steps
        self.users: Counter[int] = Counter()
        """How often each worker has opened it and not closed it, by id."""
        self.lock = threading.Lock()
        """Held for the steps and for all that follows from them."""
        self._pushers = pushers
        self._futures: dict[tuple[int, int], torch.futures.Future[Any]] = {}
        self._lost: WorkerLost | None = None

    @classmethod
    def use(cls: type[M], name: str, make: Callable[[], M], check: Callable[[M], None]) -> M:
        """Returns the object of a name, made if there is none. The caller of the call uses it.

        Args:
            name: Name of the collection.
            make: Makes the object.
            check: Raises if the object does not fit its new user.
        """
        check_types(name=(name, str))
        with _lock:
            found: M | None = cls.named.get(name)
            if found is None:
                found = cls.named[name] = make()
                tell_losses(found, cls.worker_lost)
            check(found)
            found.users[caller().id] += 1
        return found

    @expose
    def close(self) -> None:
        """Ends one use by the caller; after the last one of all workers, the name is free.

        Raises:
            ConfigurationError: The caller does not use it.
        """
        user = caller()
        with _lock:
            if not self.users[user.id]:
                raise ConfigurationError(
                    f"worker {user.name!r} does not use tables {self.name!r} on worker "
                    f"{get_worker_info().name!r}, and cannot close them for the workers that do"
                )
            self.users[user.id] -= 1
            self.users = +self.users
            if not self.users and self.named.get(self.name) is self:
                del self.named[self.name]

    def check_pusher(self, number: int, *, is_of_group: bool = False) -> None:
        """Checks that the served call is of the worker that pushes as one of the pushers.

        Args:
            number: Number of the pusher.
            is_of_group: Whether the other workers of a group may call, too.

        Raises:
            NotAllowed: It is of another worker.
            ConfigurationError: There is no such pusher.
        """
        check_types(trainer=(number, int))
        if not 0 <= number < len(self._pushers):
            raise ConfigurationError(f"trainer {number} of {len(self._pushers)} does not exist")
        names = self._pushers[number] if is_of_group else self._pushers[number][:1]
        check_caller(names, f"pull or push as trainer {number} of tables {self.name!r}")

    # Pushes

    def await_answer(self, trainer: int, step: int) -> torch.futures.Future[Any]:
        """Returns the future of a push that has been counted."""
        future = self._futures[trainer, step] = torch.futures.Future()
        return future

    def answer(self, pushes: Iterable[tuple[int, int]], value: Any) -> None:
        """Answers pushes; not with the lock, as callbacks run here."""
        for each in pushes:
            self._futures.pop(each).set_result(value)

    def fail(self, pushes: Iterable[tuple[int, int]], error: BaseException | None = None) -> None:
        """Fails pushes, by default with the loss of a worker; not with the lock."""
        for each in pushes:
            self._futures.pop(each).set_exception(error or self._lost)

    @contextlib.contextmanager
    def blaming_the_lost(self) -> Iterator[None]:
        """Raises the loss of a worker where a step is out of order because of it."""
        try:
            yield
        except StepError:
            if self._lost is not None:
                raise self._lost from None
            raise

    def worker_lost(self, error: WorkerLost) -> None:
        """Fails the pushes that wait for a worker, if it is one of a pusher."""
        for number, names in enumerate(self._pushers):
            if error.worker in names:
                with self.lock:
                    self._lost = self._lost or error
                    due = self.steps.lose(number)
                self.fail(due.failed)

    @expose
    def missing(self) -> list[str]:
        """Returns the trainers that have not pushed the step that is applied next."""
        with self.lock:
            return self.steps.missing()
