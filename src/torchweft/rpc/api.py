"""The typed calls that programs make: ``rpc_sync``, ``rpc_async`` and ``remote``.

A type checker compares ``args`` with the parameters of ``func``, and knows the result: the
coroutine's for an ``async def``, the future's for ``async_execution``. It does not check keyword
arguments in ``kwargs``; ``torchweft.rpc.on`` takes them in Python's call syntax.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from types import FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch

from torchweft.arguments import wrong_type
from torchweft.rpc.calls import (
    Destination,
    call_and_wait,
    call_method,
    checked_call,
    create,
    reach,
    start,
)
from torchweft.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.rpc.futures import Future
from torchweft.rpc.rref import RRef, check_method
from torchweft.rpc.worker import WORKER
from torchweft.serialize.tracebacks import shorten, without_own_frames

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    Ts = TypeVarTuple("Ts")

T = TypeVar("T")
Later = Coroutine[Any, Any, T] | torch.futures.Future[T]
"""What a function returns whose result comes later."""
Args = Sequence[Any] | None
Kwargs = dict[str, Any] | None


@overload
def rpc_sync(
    to: Destination,
    func: Callable[[Unpack[Ts]], Later[T]],
    args: tuple[Unpack[Ts]],
    *,
    timeout: float = ...,
) -> T: ...


@overload
def rpc_sync(
    to: Destination, func: Callable[[], Later[T]], args: None = None, *, timeout: float = ...
) -> T: ...


@overload
def rpc_sync(
    to: Destination, func: Callable[..., Later[T]], args: Args, kwargs: Kwargs, timeout: float = ...
) -> T: ...


@overload
def rpc_sync(
    to: Destination, func: Callable[..., Later[T]], *, kwargs: Kwargs, timeout: float = ...
) -> T: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[[Unpack[Ts]], T],
    args: tuple[Unpack[Ts]],
    *,
    timeout: float = ...,
) -> T: ...


@overload
def rpc_sync(
    to: Destination, func: Callable[[], T], args: None = None, *, timeout: float = ...
) -> T: ...


@overload
def rpc_sync(
    to: Destination, func: Callable[..., T], args: Args, kwargs: Kwargs, timeout: float = ...
) -> T: ...


@overload
def rpc_sync(
    to: Destination, func: Callable[..., T], *, kwargs: Kwargs, timeout: float = ...
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
    func: Callable[[Unpack[Ts]], Later[T]],
    args: tuple[Unpack[Ts]],
    *,
    timeout: float = ...,
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination, func: Callable[[], Later[T]], args: None = None, *, timeout: float = ...
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination, func: Callable[..., Later[T]], args: Args, kwargs: Kwargs, timeout: float = ...
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination, func: Callable[..., Later[T]], *, kwargs: Kwargs, timeout: float = ...
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[[Unpack[Ts]], T],
    args: tuple[Unpack[Ts]],
    *,
    timeout: float = ...,
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination, func: Callable[[], T], args: None = None, *, timeout: float = ...
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination, func: Callable[..., T], args: Args, kwargs: Kwargs, timeout: float = ...
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination, func: Callable[..., T], *, kwargs: Kwargs, timeout: float = ...
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
    func: Callable[[Unpack[Ts]], Later[T]],
    args: tuple[Unpack[Ts]],
    *,
    timeout: float = ...,
) -> RRef[T]: ...


@overload
def remote(
    to: Destination, func: Callable[[], Later[T]], args: None = None, *, timeout: float = ...
) -> RRef[T]: ...


@overload
def remote(
    to: Destination, func: Callable[..., Later[T]], args: Args, kwargs: Kwargs, timeout: float = ...
) -> RRef[T]: ...


@overload
def remote(
    to: Destination, func: Callable[..., Later[T]], *, kwargs: Kwargs, timeout: float = ...
) -> RRef[T]: ...


@overload
def remote(
    to: Destination,
    func: Callable[[Unpack[Ts]], T],
    args: tuple[Unpack[Ts]],
    *,
    timeout: float = ...,
) -> RRef[T]: ...


@overload
def remote(
    to: Destination, func: Callable[[], T], args: None = None, *, timeout: float = ...
) -> RRef[T]: ...


@overload
def remote(
    to: Destination, func: Callable[..., T], args: Args, kwargs: Kwargs, timeout: float = ...
) -> RRef[T]: ...


@overload
def remote(
    to: Destination, func: Callable[..., T], *, kwargs: Kwargs, timeout: float = ...
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
        func: As for ``rpc_sync``.
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
        made = create(agent.slots[WORKER], peer, *checked_call(func, args, kwargs), timeout)
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
            return call_method(self._reference, way, name, args, kwargs, self._timeout)
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
