"""The typed calls that programs make: ``rpc_sync``, ``rpc_async`` and ``remote``.

A type checker compares ``args`` with the parameters of ``func``, and knows the result: the
coroutine's for an ``async def``, the future's for ``async_execution``. It does not check keyword
arguments in ``kwargs``; ``torchweft.rpc.on`` takes them in Python's call syntax.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from torchweft.rpc.calls import Destination, call_and_wait, checked_call, create, start
from torchweft.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.rpc.futures import Future
from torchweft.rpc.rref import RRef
from torchweft.rpc.worker import WORKER
from torchweft.serialize.tracebacks import shorten
from torchweft.worker.current import current

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    Ts = TypeVarTuple("Ts")

T = TypeVar("T")
Answer = Coroutine[Any, Any, T] | torch.futures.Future[T]
Kwargs = dict[str, Any]


@overload
def rpc_sync(
    to: Destination,
    func: Callable[[Unpack[Ts]], Answer[T]],
    args: tuple[Unpack[Ts]],
    kwargs: None = None,
    timeout: float = ...,
) -> T: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[[], Answer[T]],
    args: None = None,
    kwargs: None = None,
    timeout: float = ...,
) -> T: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., Answer[T]],
    args: Sequence[Any] | None,
    kwargs: Kwargs,
    timeout: float = ...,
) -> T: ...


@overload
def rpc_sync(
    to: Destination, func: Callable[..., Answer[T]], *, kwargs: Kwargs, timeout: float = ...
) -> T: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[[Unpack[Ts]], T],
    args: tuple[Unpack[Ts]],
    kwargs: None = None,
    timeout: float = ...,
) -> T: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[[], T],
    args: None = None,
    kwargs: None = None,
    timeout: float = ...,
) -> T: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None,
    kwargs: Kwargs,
    timeout: float = ...,
) -> T: ...


@overload
def rpc_sync(
    to: Destination, func: Callable[..., T], *, kwargs: Kwargs, timeout: float = ...
) -> T: ...


def rpc_sync(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
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
        agent = current()
        worker = agent.slots[WORKER]
        peer = agent.find(to)
        return call_and_wait(worker, peer, *checked_call(func, args, kwargs), timeout)
    except Exception as error:
        shorten(error)
        raise


@overload
def rpc_async(
    to: Destination,
    func: Callable[[Unpack[Ts]], Answer[T]],
    args: tuple[Unpack[Ts]],
    kwargs: None = None,
    timeout: float = ...,
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[[], Answer[T]],
    args: None = None,
    kwargs: None = None,
    timeout: float = ...,
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[..., Answer[T]],
    args: Sequence[Any] | None,
    kwargs: Kwargs,
    timeout: float = ...,
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination, func: Callable[..., Answer[T]], *, kwargs: Kwargs, timeout: float = ...
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[[Unpack[Ts]], T],
    args: tuple[Unpack[Ts]],
    kwargs: None = None,
    timeout: float = ...,
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[[], T],
    args: None = None,
    kwargs: None = None,
    timeout: float = ...,
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None,
    kwargs: Kwargs,
    timeout: float = ...,
) -> Future[T]: ...


@overload
def rpc_async(
    to: Destination, func: Callable[..., T], *, kwargs: Kwargs, timeout: float = ...
) -> Future[T]: ...


def rpc_async(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Starts ``func(*args, **kwargs)`` on another worker and returns a future of its result.

    Arguments and errors are those of ``rpc_sync``; errors of the call itself are raised by the
    future's ``wait``. Tensors among the arguments must not be changed before the call has ended.
    """
    try:
        agent = current()
        worker = agent.slots[WORKER]
        return start(worker, agent.find(to), *checked_call(func, args, kwargs), timeout)
    except Exception as error:
        shorten(error)
        raise


@overload
def remote(
    to: Destination,
    func: Callable[[Unpack[Ts]], Answer[T]],
    args: tuple[Unpack[Ts]],
    kwargs: None = None,
    timeout: float = ...,
) -> RRef[T]: ...


@overload
def remote(
    to: Destination,
    func: Callable[[], Answer[T]],
    args: None = None,
    kwargs: None = None,
    timeout: float = ...,
) -> RRef[T]: ...


@overload
def remote(
    to: Destination,
    func: Callable[..., Answer[T]],
    args: Sequence[Any] | None,
    kwargs: Kwargs,
    timeout: float = ...,
) -> RRef[T]: ...


@overload
def remote(
    to: Destination, func: Callable[..., Answer[T]], *, kwargs: Kwargs, timeout: float = ...
) -> RRef[T]: ...


@overload
def remote(
    to: Destination,
    func: Callable[[Unpack[Ts]], T],
    args: tuple[Unpack[Ts]],
    kwargs: None = None,
    timeout: float = ...,
) -> RRef[T]: ...


@overload
def remote(
    to: Destination,
    func: Callable[[], T],
    args: None = None,
    kwargs: None = None,
    timeout: float = ...,
) -> RRef[T]: ...


@overload
def remote(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None,
    kwargs: Kwargs,
    timeout: float = ...,
) -> RRef[T]: ...


@overload
def remote(
    to: Destination, func: Callable[..., T], *, kwargs: Kwargs, timeout: float = ...
) -> RRef[T]: ...


def remote(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
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
        agent = current()
        worker = agent.slots[WORKER]
        made = create(worker, agent.find(to), *checked_call(func, args, kwargs), timeout)
        assert isinstance(made, RRef)
        if isinstance(func, type):
            made.value_type = func
        return made
    except Exception as error:
        shorten(error)
        raise
