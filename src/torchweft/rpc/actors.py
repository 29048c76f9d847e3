"""Actors: objects of one class on several workers, which are made, called and replaced together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from torchweft.arguments import wrong_type
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.ids import WorkerInfo
from torchweft.rpc.api import Answer, remote
from torchweft.rpc.calls import Destination
from torchweft.rpc.fan_out import as_completed
from torchweft.rpc.futures import Future
from torchweft.rpc.rref import RRef
from torchweft.rpc.targets import on
from torchweft.worker.current import current

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")


class Actors(Generic[V]):
    """References to objects of one class, one for each place; made by ``actors``.

    Methods are passed as the class has them, ``Sampler.sample``, so a type checker knows arguments
    and results, also if ``async_execution`` or ``batched`` decorates them.
    """

    def __init__(
        self, kind: Callable[..., V], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._kind = kind
        self._args = args
        self._kwargs = kwargs
        self._references: list[RRef[V]] = []

    def __len__(self) -> int:
        return len(self._references)

    def __getitem__(self, place: int) -> RRef[V]:
        return self._references[place]

    def __iter__(self) -> Iterator[RRef[V]]:
        return iter(tuple(self._references))

    def __repr__(self) -> str:
        owners = ", ".join(each.owner_name() for each in self)
        return f"{len(self)} {getattr(self._kind, '__qualname__', self._kind)} on {owners}"

    def add(self, to: Destination) -> RRef[V]:
        """Makes one more object, with the same arguments; its place is the last."""
        self._references.append(self._made(to))
        return self._references[-1]

    def replace(self, place: int, to: Destination | None = None) -> RRef[V]:
        """Makes the object of one place anew, with the same arguments, and drops the former.

        For an actor whose worker is lost. Its state is that of a new object;
        ``torchweft.checkpoint.restore`` brings the state of a snapshot back::

            samplers.replace(2)
            state = {"samplers": {"2": samplers[2]}}
            checkpoint.restore(directory, state, strict=False, random_states=False)

        Args:
            place: The place.
            to: The new worker; by default the worker that has the name of the former owner now.

        Raises:
            ConfigurationError: There is no such place.
            UnknownWorker: There is no worker ``to``.
            WorkerLost: The worker is lost, and no other has its name.
        """
        if not 0 <= place < len(self):
            raise ConfigurationError(f"place {place} of {len(self)} actors does not exist")
        if to is None:
            to = self._references[place].owner_name()
        self._references[place] = made = self._made(to)
        return made

    def _made(self, to: Destination) -> RRef[V]:
        return remote(to, self._kind, self._args, self._kwargs)

    def named(self) -> dict[str, RRef[V]]:
        """Returns the references by their places, as text: a state for a snapshot."""
        return {str(place): reference for place, reference in enumerate(self)}

    def rpc_async(
        self,
        method: Callable[Concatenate[V, P], Answer[T]] | Callable[Concatenate[V, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[Future[T]]:
        """Starts a method on all actors; returns the futures in the order of their places.

        ``torchweft.rpc.as_completed`` yields them as they end. For other time limits, make the
        calls one by one: ``rpc.on(actors[0], timeout=60).rpc_async(...)``.

        Raises:
            ArgumentTypeError: ``method`` is not a method of a class.
            WorkerLost: A worker is known to be lost. The calls to the others have been cancelled.
        """
        futures: list[Future[T]] = []
        try:
            for reference in self:
                futures.append(on(reference).rpc_async(method, *args, **kwargs))
        except BaseException:
            _cancel(futures)
            raise
        return futures

    def rpc_sync(
        self,
        method: Callable[Concatenate[V, P], Answer[T]] | Callable[Concatenate[V, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Calls a method on all actors at once; returns the results in the order of places. Blocks.

        Raises:
            Exception: The first failure of a call; the other calls are cancelled.
        """
        futures = self.rpc_async(method, *args, **kwargs)
        try:
            for future in as_completed(futures):
                future.wait()
            return [future.wait() for future in futures]
        finally:
            _cancel(futures)  # Does nothing to those that have ended.


def _cancel(futures: Iterable[Future[Any]]) -> None:
    for future in futures:
        future.cancel()


def actors(
    workers: Iterable[Destination], kind: Callable[P, V], /, *args: P.args, **kwargs: P.kwargs
) -> Actors[V]:
    """Makes an object on each of several workers, and returns references to all of them.

    Does not wait for the objects; uses of them do. A worker that is named twice gets two objects.

    Args:
        workers: The workers: names, ranks or ``WorkerInfo``.
        kind: The class.
        args: Arguments of its constructor.
        kwargs: Keyword arguments of its constructor.

    Raises:
        ArgumentTypeError: ``workers`` are not several workers, or ``kind`` cannot be called.
        UnknownWorker: There is no such worker; no object is made.

    Example::

        samplers = rpc.actors(["worker1", "worker2"], Sampler, seed=7)
        for future in rpc.as_completed(samplers.rpc_async(Sampler.sample, 128)):
            learn(future.wait())
    """
    if isinstance(workers, (str, int, WorkerInfo)) or not isinstance(workers, Iterable):
        raise ArgumentTypeError(f"workers is {workers!r}; pass several workers, as a list")
    if not callable(kind):
        raise wrong_type("kind", kind, "pass the class, and the arguments of its constructor")
    agent = current()
    peers = [agent.find(to) for to in workers]
    made: Actors[V] = Actors(kind, args, kwargs)
    for peer in peers:
        made.add(peer.info)
    return made
