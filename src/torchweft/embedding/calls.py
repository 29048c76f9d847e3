"""Calls several servers at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchweft.errors import CallTimeout, WorkerLost
from torchweft.ids import WorkerInfo
from torchweft.rpc import Future, rpc_async, rpc_sync


def call_servers(
    function: Callable[..., Any],
    arguments: Mapping[WorkerInfo, tuple[Any, ...]],
    timeout_s: float,
    meanwhile: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Runs a function on servers; returns the results by name. Blocks until all have ended.

    ``meanwhile`` is run here after the calls are sent.

    Raises:
        WorkerLost: A server is lost.
        CallTimeout: A server did not answer in time.
        Exception: The error of the first server that raised one, if neither is the case.
    """
    if len(arguments) == 1 and meanwhile is None:
        # A caller that waits in ``rpc_sync`` is woken sooner than a waiter on a future.
        ((server, given),) = arguments.items()
        return {server.name: rpc_sync(server, function, given, timeout=timeout_s)}
    futures = start_calls(function, arguments, timeout_s)
    if meanwhile is not None:
        meanwhile()
    return wait_for(futures)


def start_calls(
    function: Callable[..., Any],
    arguments: Mapping[WorkerInfo, tuple[Any, ...]],
    timeout_s: float,
) -> dict[str, Future[Any]]:
    """Runs a function on servers; returns the futures by name."""
    return {
        server.name: rpc_async(server, function, given, timeout=timeout_s)
        for server, given in arguments.items()
    }


def wait_for(futures: Mapping[str, Future[Any]]) -> dict[str, Any]:
    """Returns the results by name, and raises as ``call_servers``. Blocks until all have ended.

    If a server is lost, the calls of the others are cancelled: one may wait for a trainer that has
    noticed the loss and makes no further step.
    """
    results: dict[str, Any] = {}
    errors: list[Exception] = []

    def end(done: Any) -> None:
        try:
            done.wait()
        except WorkerLost:
            for each in futures.values():
                each.cancel()
        except Exception:
            return  # Raised below.

    if len(futures) > 1:
        for future in futures.values():
            future.add_done_callback(end)
    for name, future in futures.items():
        try:
            results[name] = future.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise next(
            (each for each in errors if isinstance(each, (WorkerLost, CallTimeout))), errors[0]
        )
    return results
