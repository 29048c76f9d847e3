"""What programs call: one function over the parts of its arguments, on several workers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torchweft.errors import ArgumentTypeError, ConfigurationError, UnknownWorker
from torchweft.mapreduce.map_call import MapCall
from torchweft.mapreduce.map_future import MapFuture
from torchweft.mapreduce.partitioners import (
    Partitioner,
    TensorDimensionPartitioner,
    batch_partitioner,
    broadcast,
    cut,
    dim_partitioner,
    exclusive_batch_partitioner,
)
from torchweft.mapreduce.plan import UNWRAPPED, Manner
from torchweft.mapreduce.reducers import Reducer, mean_reducer, sum_reducer
from torchweft.rpc.constants import UNSET_RPC_TIMEOUT

__all__ = [
    "TensorDimensionPartitioner",
    "batch_partitioner",
    "broadcast",
    "dim_partitioner",
    "exclusive_batch_partitioner",
    "mean_reducer",
    "parallelize",
    "parallelize_async",
    "parallelize_sync",
    "remote_async_call",
    "remote_sync_call",
    "sum_reducer",
]

T = TypeVar("T")
Function = Callable[..., Any]


def remote_async_call(
    func: Callable[..., Any],
    *,
    args: tuple[Any, ...] | list[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    partitioner: Partitioner | None = None,
    reducer: Reducer | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    balance: bool = False,
    rerun: bool | None = None,
    concurrency: int = 1,
) -> MapFuture[Any]:
    """Runs ``func`` over the parts of its arguments, on several workers, and returns a future.

    What all parts are given, such as a module, travels once to each worker; each part has a copy
    of its own. In an autograd context the results stay in the graph. A function can be run on any
    worker as in ``rpc_sync``; what a part does at random it should do by a seed among its
    arguments, since the part may run again after the loss of a worker.

    Returns when the first parts are sent. Tensors among the arguments must not be changed before
    the map has ended.

    Args:
        func: What to call for each part.
        args: Its positional arguments, before they are cut into parts.
        kwargs: Its keyword arguments, before they are cut into parts.
        partitioner: Cuts the arguments: a function that is called with them and returns triples
            of a worker, args and kwargs; or one worker, by rank or name, for a single part. By
            default ``batch_partitioner``.
        reducer: Is called here with the list of results, in the order of the parts, and returns
            the result of the map. If it has a parameter ``weights``, it gets the sizes of the
            parts. By default the result is the list.
        timeout: Seconds for the whole map; 0 for no limit. By default each call has that of the
            worker.
        balance: Whether a worker that has nothing to do takes parts that wait for another one.
        rerun: Whether the parts of a worker that is lost run again on others; by default if the
            partitioner did not choose the worker for a reason: with ``dim_partitioner`` and its
            kin, and not with a worker or a function of yours.
        concurrency: How many parts a worker runs at a time.

    Returns:
        A ``torch.futures.Future`` of the result. Its ``wait`` blocks, and raises the error of a
        part, with a note which one it was, ``CallTimeout``, ``WorkerLost`` or ``ReduceError``. It
        can be awaited, and cancelled.

    Raises:
        ArgumentTypeError: ``func``, ``partitioner`` or another argument is of the wrong type.
        ConfigurationError: The partitioner has returned something else than such triples, or there
            is no worker of that rank or name; or the tensors cannot be cut.
        NotInitialized: This process is no worker.
    """
    _check(func, reducer, concurrency)
    manner = Manner(timeout, balance, rerun, concurrency)
    while True:
        made = cut(partitioner, args, kwargs)
        try:
            call = MapCall(func, made, manner)
        except UnknownWorker:
            if not made.is_any:
                raise
            continue  # It has left the group meanwhile, so there are others to choose from now.
        return call.begin(reducer)


def remote_sync_call(
    func: Callable[..., Any],
    *,
    args: tuple[Any, ...] | list[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    partitioner: Partitioner | None = None,
    reducer: Reducer | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    balance: bool = False,
    rerun: bool | None = None,
    concurrency: int = 1,
) -> Any:
    """Runs ``func`` over the parts of its arguments, on several workers. Blocks.

    Arguments and errors are those of ``remote_async_call``, and of its future.

    Returns:
        What the reducer made of the results; without one, their list, also if there is but one.
    """
    future = remote_async_call(
        func,
        args=args,
        kwargs=kwargs,
        partitioner=partitioner,
        reducer=reducer,
        timeout=timeout,
        balance=balance,
        rerun=rerun,
        concurrency=concurrency,
    )
    try:
        return future.wait()
    except BaseException:
        future.cancel()  # Ctrl-C: nobody waits any more.
        raise


def parallelize(
    partitioner: Partitioner | None = None,
    reducer: Reducer | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    balance: bool = False,
    rerun: bool | None = None,
    concurrency: int = 1,
) -> Callable[[Function], Function]:
    """Returns a decorator: who calls the function has it run over the parts of the arguments.

    The original goes by name, which is that of the function and ``__parallelize_unwrapped__``; so
    the module must be the same on all workers. What is defined in a function travels by value.

    Args:
        partitioner: As for ``remote_async_call``.
        reducer: As for ``remote_async_call``; by default ``mean_reducer`` if there is no
            partitioner either.
        timeout: As for ``remote_async_call``.
        balance: As for ``remote_async_call``.
        rerun: As for ``remote_async_call``.
        concurrency: As for ``remote_async_call``.

    Returns:
        The decorator. The decorated function blocks, and returns and raises what
        ``remote_sync_call`` does.
    """
    call = _with_options(
        remote_sync_call, partitioner, reducer, timeout, balance, rerun, concurrency
    )
    return functools.partial(_wrapped, call, f"{UNWRAPPED}_unwrapped__")


parallelize_sync = parallelize


def parallelize_async(
    partitioner: Partitioner | None = None,
    reducer: Reducer | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    balance: bool = False,
    rerun: bool | None = None,
    concurrency: int = 1,
) -> Callable[[Function], Function]:
    """Returns a decorator like that of ``parallelize``, for a function that returns a future.

    Arguments are those of ``parallelize``; the original's name ends with
    ``__parallelize_async_unwrapped__``.
    """
    call = _with_options(
        remote_async_call, partitioner, reducer, timeout, balance, rerun, concurrency
    )
    return functools.partial(_wrapped, call, f"{UNWRAPPED}_async_unwrapped__")


def _with_options(
    call: Callable[..., T],
    partitioner: Partitioner | None,
    reducer: Reducer | None,
    timeout: float,
    balance: bool,
    rerun: bool | None,
    concurrency: int,
) -> Callable[..., T]:
    if partitioner is None and reducer is None:
        reducer = mean_reducer
    return functools.partial(
        call,
        partitioner=partitioner,
        reducer=reducer,
        timeout=timeout,
        balance=balance,
        rerun=rerun,
        concurrency=concurrency,
    )


def _wrapped(call: Callable[..., Any], suffix: str, function: Function) -> Function:
    if not callable(function):
        raise ArgumentTypeError(
            f"a {type(function).__name__} cannot be called; decorate with parentheses, as in "
            "@parallelize()"
        )

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if alias is not None:
            _keep_findable(function, alias)
        return call(function, args=args, kwargs=kwargs)

    alias = _alias(function, suffix)
    if alias is not None:
        _keep_findable(function, alias)
    return wrapper


def _alias(function: Function, suffix: str) -> str | None:
    """Puts a function under a further name into its module; returns the name.

    None for what is defined in a function, which travels by value, or is no function.
    """
    if not isinstance(function, FunctionType) or "<locals>" in function.__qualname__:
        return None
    module = sys.modules.get(function.__module__)
    if module is None:
        return None
    # A method has no class yet in which it could be found.
    name = function.__qualname__.replace(".", "__") + suffix
    setattr(module, name, function)
    return name


def _keep_findable(function: Function, alias: str) -> None:
    """Has a function go by its alias where its own name means something else: the decorated one.

    Otherwise it keeps its name: if it was imported and is decorated here, other workers know no
    alias. Asked again at each call, as the decorated one may be given the name at any time.
    """
    found: Any = sys.modules[function.__module__]
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not function:
        function.__name__ = function.__qualname__ = alias


def _check(func: Any, reducer: Any, concurrency: Any) -> None:
    if not callable(func):
        raise ArgumentTypeError(f"func is {func!r}; pass the function itself, and args=(...)")
    if reducer is not None and not callable(reducer):
        raise ArgumentTypeError(f"reducer is {reducer!r}; pass a function of a list, or None")
    if not isinstance(concurrency, int):
        raise ArgumentTypeError(f"concurrency is {concurrency!r}; pass a number of parts")
    if concurrency < 1:
        raise ConfigurationError(f"concurrency is {concurrency}; it must be 1 or more")
