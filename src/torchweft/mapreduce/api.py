"""The functions that programs call to map a function over the parts of its arguments."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torchweft.arguments import UNSET_RPC_TIMEOUT, check_type, limit_of
from torchweft.errors import ArgumentTypeError, ConfigurationError, UnknownWorker
from torchweft.mapreduce.execution import MapFuture, run_map
from torchweft.mapreduce.partitioners import (
    Partitioner,
    TensorDimensionPartitioner,
    batch_partitioner,
    broadcast,
    cut,
    dim_partitioner,
    exclusive_batch_partitioner,
)
from torchweft.mapreduce.plan import Manner, Plan, is_named
from torchweft.mapreduce.reducers import Reducer, mean_reducer, sum_reducer

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

Function = Callable[..., Any]

_UNWRAPPED = "__parallelize"
"""Follows the name of a function in that of its original; messages do not show the latter."""


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

    An argument that all parts share, such as a module, travels once to each worker; each part has
    a copy of its own. Buffers of modules that the first part changes, such as BatchNorm's, come
    back into the caller's modules when the map completes, as those of rank 0 do under DDP; other
    changes stay in the copies. In an autograd context the results stay in the graph. Any function
    that ``rpc_sync`` can call can be mapped. A part may run again after the loss of a worker, so it
    should draw random numbers from a seed among its arguments.

    Returns when the first parts are sent. Tensors among the arguments must not be changed before
    the map has ended.

    Args:
        func: The function to call for each part.
        args: Its positional arguments, before they are cut into parts.
        kwargs: Its keyword arguments, before they are cut into parts.
        partitioner: Cuts the arguments: a function that is called with them and returns triples
            of a worker, args and kwargs; or one worker, by rank or name, for a single part. By
            default ``batch_partitioner``.
        reducer: Is called on this worker with the list of results, in the order of the parts, and
            returns the result of the map. If it has a parameter ``weights``, it gets the sizes of
            the parts. By default the result is the list.
        timeout: Seconds for the whole map; 0 for no limit. By default each call has the default
            timeout of the worker.
        balance: Whether an idle worker takes parts that wait for another worker.
        rerun: Whether the parts of a lost worker run again on other workers. By default they do
            if any worker may run any part: with ``dim_partitioner`` and its variants, but not with
            a worker or a function of yours as ``partitioner``.
        concurrency: How many parts a worker runs at a time.

    Returns:
        A ``torch.futures.Future`` of the result. Its ``wait`` blocks, and raises the error of a
        part (a note names the part), ``CallTimeout``, ``WorkerLost`` or ``ReduceError``. The
        future can be awaited, and cancelled.

    Raises:
        ArgumentTypeError: ``func``, ``partitioner`` or another argument is of the wrong type.
        ConfigurationError: The partitioner returned something other than such triples, there is
            no worker of that rank or name, the tensors cannot be cut, or ``concurrency`` is less
            than 1.
        NotInitialized: This process is not a worker.
    """
    _check(func, reducer, concurrency)
    check_type(balance, bool, "balance", "True or False")
    if rerun is not None:
        check_type(rerun, bool, "rerun", "True, False or None")
    limit_of(timeout, 0)
    manner = Manner(timeout, balance, rerun, concurrency)
    while True:
        made = cut(partitioner, args, kwargs)
        try:
            plan = Plan(func, made, manner)
        except UnknownWorker:
            if not made.is_any:
                raise
            continue  # A chosen worker has left the group: choose among the remaining ones.
        return run_map(plan, reducer)


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

    Arguments and errors are those of ``remote_async_call`` and of its future.

    Returns:
        The reduced result; without a reducer the list of results, even of a single one.
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
        future.cancel()  # Ctrl-C: no thread waits for the result any more.
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
    """Returns a decorator: calls of the decorated function run over the parts of its arguments.

    Workers find the original function by name, which is the function's name followed by
    ``__parallelize_unwrapped__``; so the module must be the same on all workers. A function that
    is defined in another function travels by value.

    Args:
        partitioner: As for ``remote_async_call``.
        reducer: As for ``remote_async_call``; ``mean_reducer`` if neither ``reducer`` nor
            ``partitioner`` is given.
        timeout: As for ``remote_async_call``.
        balance: As for ``remote_async_call``.
        rerun: As for ``remote_async_call``.
        concurrency: As for ``remote_async_call``.

    Returns:
        The decorator. The decorated function blocks, and returns and raises the same as
        ``remote_sync_call``.
    """
    manner = Manner(timeout, balance, rerun, concurrency)
    suffix = f"{_UNWRAPPED}_unwrapped__"
    return _decorator(remote_sync_call, suffix, partitioner, reducer, manner)


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
    """Returns a decorator as ``parallelize`` does; the decorated function returns a future.

    Arguments are those of ``parallelize``; the original's name ends with
    ``__parallelize_async_unwrapped__``.
    """
    manner = Manner(timeout, balance, rerun, concurrency)
    suffix = f"{_UNWRAPPED}_async_unwrapped__"
    return _decorator(remote_async_call, suffix, partitioner, reducer, manner)


def _decorator(
    call: Callable[..., Any],
    suffix: str,
    partitioner: Partitioner | None,
    reducer: Reducer | None,
    manner: Manner,
) -> Callable[[Function], Function]:
    if partitioner is None and reducer is None:
        reducer = mean_reducer
    options = manner._asdict()
    call = functools.partial(call, partitioner=partitioner, reducer=reducer, **options)
    return functools.partial(_wrapped, call, suffix)


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
    """Adds a function to its module under a second name, and returns that name.

    Returns None for a function defined in another function, which travels by value, and for a
    callable that is not a function.
    """
    if not isinstance(function, FunctionType) or "<locals>" in function.__qualname__:
        return None
    module = sys.modules.get(function.__module__)
    if module is None:
        return None
    # A method's class does not exist yet, so the alias goes into the module.
    name = function.__qualname__.replace(".", "__") + suffix
    setattr(module, name, function)
    return name


def _keep_findable(function: Function, alias: str) -> None:
    """Renames a function to its alias if its own name now leads to another object: its wrapper.

    Otherwise the function keeps its name: if it was imported and is decorated here, other workers
    know no alias. Checked at each call, since the wrapper may be bound to the name at any time.
    """
    if not is_named(function):
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
