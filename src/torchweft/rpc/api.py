"""The typed calls that programs make, to one worker or several, and to the values of references.

A type checker knows the result of a call: the coroutine's for an ``async def``, the future's for
``async_execution``. It does not check ``args`` and ``kwargs``; ``torchweft.rpc.on`` takes them in
Python's call syntax, and has them checked.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from types import FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

import torch

from torchweft.arguments import UNSET_RPC_TIMEOUT, limit_of, wrong_type
from torchweft.engine.codec.exceptions import fresh_copy
from torchweft.engine.codec.registry import has_callable_methods
from torchweft.engine.codec.tracebacks import shorten, without_own_frames
from torchweft.engine.protocol.observing import VALUE, Wait, reference_key
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.engine.worker import current as of_process
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.references import Handle
from torchweft.errors import (
    ArgumentTypeError,
    CallTimeout,
    ConfigurationError,
    NotOwner,
    SerializationError,
    WorkerLost,
)
from torchweft.ids import WorkerInfo
from torchweft.rpc.calls import (
    BACKWARD_FROM,
    CALL_METHOD,
    FETCH,
    Destination,
    Future,
    OnLoop,
    call_and_wait,
    checked_call,
    create,
    fail,
    reach,
    start,
    use,
)
from torchweft.rpc.proxies import (
    CONSTRUCT,
    Proxy,
    check_method,
    is_made_by_coroutine,
    limit_of_method,
)
from torchweft.rpc.serving import remaining_time, run_backward
from torchweft.rpc.waiting import as_completed
from torchweft.rpc.worker import WORKER, current_worker

T = TypeVar("T")
Later = Coroutine[Any, Any, T] | torch.futures.Future[T]
"""What a function returns whose result comes later."""
Args = Sequence[Any] | None
Kwargs = dict[str, Any] | None


@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., Later[T]],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
) -> T: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., T],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
) -> T: ...


def rpc_sync(
    to: Destination,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Runs ``func(*args, **kwargs)`` on another worker and returns its result. Blocks.

    Args:
        to: The worker: its name, its rank, or its ``WorkerInfo``; may be this one.
        func: Any callable: a function, class, method or operator, a TorchScript function, an
            ``async def``, or, by value, a lambda or closure.
        args: Its positional arguments. Tensors travel without being pickled.
        kwargs: Its keyword arguments.
        timeout: Seconds to wait at most; 0 for no limit, by default the worker's ``rpc_timeout``.
            In a function that another worker has called, at most as long as its caller waits.

    Returns:
        The function's result. Tensors in it own their memory.

    Raises:
        UnknownWorker: There is no worker ``to``.
        CallTimeout: There was no answer in time. A function that has not started will not start;
            a running one can query ``is_cancelled``.
        CallCancelled: The function that makes this call was itself called, and its caller has
            given up.
        WorkerLost: The worker was lost before it answered.
        SerializationError: The callable, an argument or the result cannot be serialized.
        Exception: The error of the function, with its remote traceback.
    """
    try:
        agent, peer = reach(to)
        worker = agent.slots[WORKER]
        return call_and_wait(worker, peer, *checked_call(func, args, kwargs), timeout)
    except Exception as error:
        shorten(error)
        raise


@overload
def rpc_async(
    to: Destination,
    func: Callable[..., Later[T]],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[..., T],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
) -> Future[T]: ...


def rpc_async(
    to: Destination,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Starts ``func(*args, **kwargs)`` on another worker and returns a future of its result.

    Arguments and errors are those of ``rpc_sync``; errors of the call itself are raised by the
    future's ``wait``. Tensors among the arguments must not be changed before the call has ended.
    """
    try:
        agent, peer = reach(to)
        return start(agent.slots[WORKER], peer, *checked_call(func, args, kwargs), timeout)
    except Exception as error:
        shorten(error)
        raise


@overload
def remote(
    to: Destination,
    func: Callable[..., Later[T]],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
) -> RRef[T]: ...


@overload
def remote(
    to: Destination,
    func: Callable[..., T],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
) -> RRef[T]: ...


def remote(
    to: Destination,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Starts ``func(*args, **kwargs)`` on another worker, which keeps the result.

    Does not wait for the function; uses of the value do. The function has no time limit, as the
    value is wanted as long as a reference to it exists; pass a timeout where the value is used.

    Args:
        to: As for ``rpc_sync``.
        func: As for ``rpc_sync``. The ``__init__`` of a class may be an ``async def``.
        args: As for ``rpc_sync``.
        kwargs: As for ``rpc_sync``.
        timeout: Accepted for compatibility.

    Returns:
        A reference to the result. If the function raises, using the reference raises that error.

    Raises:
        UnknownWorker: There is no worker ``to``.
        WorkerLost: The worker is lost. If it turns out to be lost or unreachable only later, uses
            of the reference raise.
        SerializationError: The callable or an argument cannot be serialized.
    """
    try:
        agent, peer = reach(to)
        worker, call = agent.slots[WORKER], checked_call(func, args, kwargs)
        if isinstance(func, type) and is_made_by_coroutine(func):
            made = create(worker, peer, CONSTRUCT, call, {}, timeout, (str, func.__qualname__))
        else:
            made = create(worker, peer, *call, timeout)
        assert isinstance(made, RRef)
        if isinstance(func, type):
            made.value_type = func
        return made
    except Exception as error:
        shorten(error)
        raise


P = ParamSpec("P")
V = TypeVar("V")

_METHODS = (FunctionType, MethodDescriptorType, WrapperDescriptorType)


@overload
def on(to: RRef[V], timeout: float = ...) -> OnValue[V]: ...


@overload
def on(to: Destination, timeout: float = ...) -> OnWorker: ...


@without_own_frames
def on(to: Any, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Returns an object that calls functions on a worker, or methods of a referenced value.

    ``rpc.on("ps").rpc_sync(f, x, scale=2)`` is ``rpc.rpc_sync("ps", f, (x,), {"scale": 2})``, and
    ``rpc.on(model).rpc_sync(Model.loss, x)`` is ``model.rpc_sync().loss(x)``; but a type checker
    knows the parameters and the result. Does not block, and makes no call.

    Args:
        to: A worker (its name, its rank, or its ``WorkerInfo``), or a reference.
        timeout: Seconds for each call; 0 for no limit, by default the worker's ``rpc_timeout``.

    Raises:
        UnknownWorker: There is no worker ``to``.
        ReferenceGone: The reference is of a group that has been shut down.

    Example::

        model = rpc.on("ps").remote(Model, 512, bias=False)  # an RRef[Model]
        future = rpc.on(model).rpc_async(Model.loss, batch)  # a Future of what loss returns
    """
    if isinstance(to, RRef):
        to.agent()
        return OnValue(to, timeout)
    reach(to)
    return OnWorker(to, timeout)


class OnWorker:
    """Calls functions on a worker; made by ``on``. Thread-safe."""

    def __init__(self, to: Destination, timeout: float) -> None:
        self._to = to
        self._timeout = timeout

    @overload
    def rpc_sync(self, func: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def rpc_sync(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def rpc_sync(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs ``func(*args, **kwargs)`` there and returns its result; see ``rpc.rpc_sync``."""
        return rpc_sync(self._to, func, args, kwargs, self._timeout)

    @overload
    def rpc_async(
        self, func: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    @overload
    def rpc_async(
        self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    def rpc_async(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts ``func(*args, **kwargs)`` there; see ``rpc.rpc_async``."""
        return rpc_async(self._to, func, args, kwargs, self._timeout)

    @overload
    def remote(
        self, func: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RRef[T]: ...
    @overload
    def remote(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> RRef[T]: ...
    def remote(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Starts ``func(*args, **kwargs)`` there, where the result stays; see ``rpc.remote``."""
        return remote(self._to, func, args, kwargs, self._timeout)

    def __repr__(self) -> str:
        return f"on({self._to!r})"


class OnValue(Generic[V]):
    """Calls methods of the value behind a reference, on its owner; made by ``on``. Thread-safe.

    A method is passed as an attribute of its class, ``Model.loss``. The value's own method of that
    name runs, also if the value's class is a subclass that overrides it.
    """

    def __init__(self, reference: RRef[V], timeout: float) -> None:
        self._reference = reference
        self._timeout = timeout

    @overload
    def rpc_sync(
        self, method: Callable[Concatenate[V, P], Later[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    def rpc_sync(
        self, method: Callable[Concatenate[V, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    def rpc_sync(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method and returns its result. Blocks; see ``rpc.rpc_sync``.

        Raises:
            ArgumentTypeError: ``method`` is not a method of a class.
            MethodNotFound: The value has no such method.
        """
        return self._call("sync", method, args, kwargs)

    @overload
    def rpc_async(
        self, method: Callable[Concatenate[V, P], Later[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    @overload
    def rpc_async(
        self, method: Callable[Concatenate[V, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    def rpc_async(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Starts a method and returns a future of its result; raises as ``rpc_sync`` does."""
        return self._call("async", method, args, kwargs)

    @overload
    def remote(
        self, method: Callable[Concatenate[V, P], Later[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RRef[T]: ...
    @overload
    def remote(
        self, method: Callable[Concatenate[V, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> RRef[T]: ...
    def remote(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Starts a method whose result stays on the owner; raises as ``rpc_sync`` does."""
        return self._call("remote", method, args, kwargs)

    def _call(self, way: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            name = method_name(method)
            check_method(self._reference, name)
            args, timeout = (name, *args), self._timeout
            if timeout is UNSET_RPC_TIMEOUT:
                timeout = limit_of_method(method)
            return use(self._reference, way, CALL_METHOD, args, kwargs, timeout, name)
        except Exception as error:
            shorten(error)
            raise

    def __repr__(self) -> str:
        return f"on({self._reference!r})"


def method_name(method: object) -> str:
    """Returns the name of a method that is passed as an attribute of its class.

    Raises:
        ArgumentTypeError: It is none.
    """
    if isinstance(method, _METHODS):
        home, _, name = method.__qualname__.rpartition(".")
        if home and not home.endswith("<locals>"):
            return name
    raise wrong_type("method", method, "pass a method as its class has it, like Model.loss")


# Calls to several workers at once


@overload
def rpc_all(
    workers: Iterable[Destination],
    func: Callable[..., Later[T]],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
    *,
    return_exceptions: Literal[False] = False,
) -> list[T]: ...


@overload
def rpc_all(
    workers: Iterable[Destination],
    func: Callable[..., Later[T]],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
    *,
    return_exceptions: bool,
) -> list[T | Exception]: ...


@overload
def rpc_all(
    workers: Iterable[Destination],
    func: Callable[..., T],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
    *,
    return_exceptions: Literal[False] = False,
) -> list[T]: ...


@overload
def rpc_all(
    workers: Iterable[Destination],
    func: Callable[..., T],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
    *,
    return_exceptions: bool,
) -> list[T | Exception]: ...


@without_own_frames
def rpc_all(
    workers: Iterable[Destination],
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    return_exceptions: bool = False,
) -> list[Any]:
    """Runs ``func(*args, **kwargs)`` on several workers at the same time. Blocks.

    Sends the arguments to every worker. For large tensors that many workers need see
    ``torchweft.mapreduce.broadcast``, where workers forward them. Thread-safe.

    Args:
        workers: The workers: names, ranks or ``WorkerInfo``; a worker that is named twice is
            called twice.
        func: As for ``rpc_sync``.
        args: As for ``rpc_sync``.
        kwargs: As for ``rpc_sync``.
        timeout: Seconds that each call may take; as for ``rpc_sync``.
        return_exceptions: Whether to wait for all workers, and to return the errors of failed
            calls in place of their results.

    Returns:
        The results, in the order of ``workers``.

    Raises:
        UnknownWorker: There is no such worker; no call is made.
        Exception: The first failure of a call, as ``rpc_sync`` raises it. The other calls are
            cancelled; their failures are dropped.

    Example::

        names = ["trainer0", "trainer1"]
        losses = rpc.rpc_all(names, train, args=(epoch,))
    """
    agent = of_process.current()
    peers = _peers_of(agent, workers)
    call = checked_call(func, args, kwargs)
    futures: list[torch.futures.Future[Any]] = []
    try:
        for peer in peers:
            futures.append(_started(agent, peer, call, timeout))
        if return_exceptions:
            return [_outcome(future) for future in futures]
        return _results(futures)
    finally:
        _cancel(futures)


def _peers_of(agent: Agent, workers: Iterable[Destination]) -> list[Peer]:
    if isinstance(workers, (str, int, WorkerInfo)) or not isinstance(workers, Iterable):
        raise ArgumentTypeError(f"workers is {workers!r}; pass several workers, as a list")
    return [agent.find(to) for to in workers]


def _results(futures: Sequence[torch.futures.Future[T]]) -> list[T]:
    """Returns the results of all calls, or raises the first failure and cancels the others."""
    try:
        for future in as_completed(futures):
            future.wait()
        return [future.wait() for future in futures]
    finally:
        _cancel(futures)


def _cancel(futures: Iterable[torch.futures.Future[Any]]) -> None:
    """Cancels the calls that have not ended."""
    for future in futures:
        if isinstance(future, Future):
            future.cancel()


def _started(
    agent: Agent, peer: Peer, call: tuple[Any, Any, Any], timeout: float
) -> torch.futures.Future[Any]:
    try:
        return start(agent.slots[WORKER], peer, *call, timeout)
    except WorkerLost as error:  # One of several: the others may answer.
        lost: torch.futures.Future[Any] = torch.futures.Future()
        fail(lost, error)
        return lost


def _outcome(future: torch.futures.Future[Any]) -> Any:
    try:
        return future.wait()
    except Exception as error:
        if is_of_handler(error):
            raise
        return error


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

    @overload
    def rpc_async(
        self, method: Callable[Concatenate[V, P], Later[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[T]]: ...
    @overload
    def rpc_async(
        self, method: Callable[Concatenate[V, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[T]]: ...
    def rpc_async(
        self, method: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> list[Future[Any]]:
        """Starts a method on all actors; returns the futures in the order of their places.

        ``torchweft.rpc.as_completed`` yields them as they end. For other time limits, make the
        calls one by one: ``rpc.on(actors[0], timeout=60).rpc_async(...)``.

        Raises:
            ArgumentTypeError: ``method`` is not a method of a class.
            WorkerLost: A worker is known to be lost. The calls to the others have been cancelled.
        """
        futures: list[Future[Any]] = []
        try:
            for reference in self:
                futures.append(on(reference).rpc_async(method, *args, **kwargs))
        except BaseException:
            _cancel(futures)
            raise
        return futures

    @overload
    def rpc_sync(
        self, method: Callable[Concatenate[V, P], Later[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]: ...
    @overload
    def rpc_sync(
        self, method: Callable[Concatenate[V, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]: ...
    def rpc_sync(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method on all actors at once; returns the results in the order of places. Blocks.

        Raises:
            Exception: The first failure of a call; the other calls are cancelled.
        """
        return _results(self.rpc_async(method, *args, **kwargs))


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
    peers = _peers_of(of_process.current(), workers)
    if not callable(kind):
        raise wrong_type("kind", kind, "pass the class, and the arguments of its constructor")
    made: Actors[V] = Actors(kind, args, kwargs)
    for peer in peers:
        made.add(peer.info)
    return made


# References to values that live on some worker, and proxies of their methods


@has_callable_methods
class RRef(Handle, Generic[T]):
    """A reference to a value of type ``T`` on the worker that owns it.

    The value lives for as long as a reference to it exists anywhere. A reference can be sent in
    arguments and results, alone or inside containers; the value then stays where it is.
    References cannot be pickled in any other way, as the copy would not be counted. Two references
    to one value are equal, wherever they have travelled, and may be keys of a dict. But a second
    ``RRef(value)`` of the same object is another reference.

    Args:
        value: A value of this worker, which thereby becomes its owner.
        type_hint: Accepted for compatibility; Weft needs no type.

    Raises:
        NotInitialized: This process is not a worker.
    """

    __slots__ = ()

    def __init__(self, value: T, type_hint: Any = None) -> None:
        keeper = current_worker().references
        self._bind(keeper, keeper.own(value), is_new=True)

    # The value

    @without_own_frames
    def local_value(self) -> T:
        """Returns the value itself; only on its owner. Waits, for a limited time, until it is made.

        Raises:
            NotOwner: Another worker owns it; use ``to_here``.
            Exception: The error of the function that was to make the value.
        """
        if not self.is_owner():
            raise NotOwner(
                "local_value() works on the owner only, which is worker "
                f"{self.owner_name()!r}; use to_here() for a copy"
            )
        return self._wait_for_value(self.agent().default_timeout_s)

    def _wait_for_value(self, timeout_s: float) -> T:
        owned = self._keeper.value_of(self.id)
        if not owned.is_ready:
            timeout_s = min(timeout_s, remaining_time())  # The caller's limit, if any.
            began_s = time.monotonic()

            def parts() -> list[Wait]:
                name, age_s = reference_key(self.id), time.monotonic() - began_s
                return [] if owned.is_ready else [Wait(VALUE, name, age_s, name, (owner,))]

            owner = self.owner_name()
            with self.agent().reactor.waiting(parts):
                if not owned.wait(timeout_s):
                    raise self._still_being_made(timeout_s)
        if owned.error is not None:
            raise fresh_copy(owned.error)
        value: T = owned.value
        if owned.mark is not None:
            device_streams.use(owned.mark, value)
        return value

    def _still_being_made(self, timeout_s: float) -> CallTimeout:
        return CallTimeout(
            f"RPC ran for more than set timeout ({timeout_s * 1e3:.0f} ms): "
            f"the value of {self._keeper.describe(self.id)} is still being made",
            worker=self.owner_name(),
            elapsed_s=timeout_s,
        )

    def __await__(self) -> Generator[Any, Any, T]:
        """Does as ``to_here``, in a coroutine: ``value = await reference``.

        Other coroutines go on meanwhile. A coroutine that is cancelled gives only the copy up.
        """
        return self._fetched().__await__()

    async def _fetched(self) -> T:
        if not self.is_owner():
            self._keeper.check_alive(self.id)
            call = use(self, "async", FETCH, (), {}, UNSET_RPC_TIMEOUT, "to_here")
            fetched: T = await call
            return fetched
        owned, limit_s = self._keeper.value_of(self.id), self.agent().default_timeout_s
        limit_s = min(limit_s, remaining_time())
        made = asyncio.Event()
        owned.when_ready(OnLoop(asyncio.get_running_loop(), lambda _: made.set()))
        try:
            await asyncio.wait_for(made.wait(), None if math.isinf(limit_s) else limit_s)
        except asyncio.TimeoutError:
            raise self._still_being_made(limit_s) from None
        return self._wait_for_value(limit_s)

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Returns a copy of the value, fetched from its owner; on the owner, the value itself.

        Blocks until the value is made and has arrived.

        Args:
            timeout: Seconds to wait at most; 0 for no limit, by default the ``rpc_timeout``.

        Raises:
            CallTimeout: The value did not arrive in time.
            OwnerLost: The owner is lost, and the value with it.
            Exception: The error of the function that was to make the value.
        """
        try:
            if self.is_owner():
                agent = self.agent()
                return self._wait_for_value(limit_of(timeout, agent.default_timeout_s))
            self._keeper.check_alive(self.id)
            value: T = use(self, "sync", FETCH, (), {}, timeout, "to_here")
            return value
        except Exception as error:
            shorten(error)
            raise

    # Calls on the value

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Returns a proxy: its methods run on the owner, and return their results.

        Where this worker has made the value with a class, an attribute that is no method is read,
        as a copy: ``counter.rpc_sync().count``. That is a call, and blocks. Of other values a name
        stands for a method, which raises if it is compared or asked for its truth. Attributes
        cannot be set by a proxy.

        Editors and type checkers take the proxy for the value itself, whose methods they know. An
        ``async def`` returns its coroutine's result; only ``torchweft.rpc.on`` types that.

        Args:
            timeout: Seconds for each call; 0 for no limit, by default the ``rpc_timeout``.

        Raises:
            MethodNotFound: By the proxy: the value is known to have no such method or attribute.
            CallTimeout: By a method: it took longer.
            OwnerLost: By a method: the owner is lost, and the value with it.
            Exception: By a method: its own error.
        """
        proxy: T = self._proxy("sync", timeout)
        return proxy

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> AsyncProxy:
        """Returns a proxy: its methods run on the owner, and return futures.

        ``timeout`` and errors are those of ``rpc_sync``; a future's ``wait`` raises them.
        ``torchweft.rpc.on(reference)`` does the same with types.
        """
        proxy: AsyncProxy = self._proxy("async", timeout)
        return proxy

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> RemoteProxy:
        """Returns a proxy: its methods run on the owner, and return references to the results.

        ``timeout`` and errors are those of ``rpc_sync``; a reference's ``to_here`` raises them.
        ``torchweft.rpc.on(reference)`` does the same with types.
        """
        proxy: RemoteProxy = self._proxy("remote", timeout)
        return proxy

    def _proxy(self, way: str, timeout: float) -> Any:
        return Proxy(self, way, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs a backward pass from the value, a scalar tensor, on its owner. Blocks.

        Args:
            dist_autograd_ctx_id: The autograd context; -1 for a local pass into ``.grad``, on the
                owner only.
            retain_graph: Whether the graph is kept for another pass.

        Raises:
            AutogradError: The value requires no grad, the context is not open, or the pass failed.
            OwnerLost: The owner is lost.
        """
        if self.is_owner():
            worker = self.agent().slots[WORKER]
            run_backward(worker, self.local_value(), dist_autograd_ctx_id, retain_graph)
        elif dist_autograd_ctx_id < 0:
            raise NotOwner(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: the value is on worker "
                f"{self.owner_name()!r}; pass the number of an autograd context, from "
                "'with torchweft.autograd.context() as context_id'"
            )
        else:
            args = (dist_autograd_ctx_id, retain_graph)
            use(self, "sync", BACKWARD_FROM, args, {}, 0.0, "backward")

    def __reduce__(self) -> str | tuple[Any, ...]:
        if sys._getframe(1).f_code is _FINDS_TENSORS:
            return str, ()
        raise SerializationError(
            "Can not pickle rref in python pickler: an RRef can only travel in the arguments or "
            "the result of an RPC; to keep the value, fetch it with to_here() and save that"
        )

    def __copy__(self) -> RRef[T]:
        return self

    def __deepcopy__(self, memo: object) -> RRef[T]:
        return self


_FINDS_TENSORS = getattr(getattr(torch._jit_internal, "_extract_tensors", None), "__code__", None)
"""The code of the function by which PyTorch pickles the result of a future, to find tensors."""


if TYPE_CHECKING:

    class AsyncProxy(Proxy):
        """The type of a proxy whose methods return futures, for type checkers."""

        def __getattr__(self, name: str) -> Callable[..., Future[Any]]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Future[Any]: ...  # noqa: D102

    class RemoteProxy(Proxy):
        """The type of a proxy whose methods return references, for type checkers."""

        def __getattr__(self, name: str) -> Callable[..., RRef[Any]]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> RRef[Any]: ...  # noqa: D102
