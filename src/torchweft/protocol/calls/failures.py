"""The errors by which calls end, each with its true reason."""

from __future__ import annotations

from torchweft import knobs
from torchweft.errors import (
    CallCancelled,
    CallTimeout,
    ConfigurationError,
    QueueFull,
    SerializationError,
)
from torchweft.protocol.calls.server import ServedCall
from torchweft.protocol.calls.table import Named, OpenCall

_ROUNDING_S = 1e-6
"""Rounding tolerance for comparing deadlines."""


def timed_out(call: OpenCall, now_s: float, was_sent: bool) -> CallTimeout:
    """Returns the error of a call whose time is up.

    Args:
        call: The call.
        now_s: The time.
        was_sent: Whether there was a connection to send it over.
    """
    name, parent = function_name(call.function), call.parent
    text = (
        f"RPC ran for more than set timeout ({call.timeout_s * 1e3:.0f} ms) and will now be "
        f"marked with an error: {name} on worker {call.worker_name!r}; "
    )
    if parent is not None and call.deadline_s >= parent.deadline_s - _ROUNDING_S:
        text += _late_with(parent)
    elif not was_sent:
        text += (
            "it was not sent: that worker has not answered the attempt to connect to it. It is "
            "stopped or busy, or the network is slow"
        )
    else:
        text += (
            "the worker may still be running it. Pass a longer timeout= if the function needs "
            "the time"
        )
    elapsed_s = now_s - call.started_s
    return CallTimeout(text, worker=call.worker_name, call=name, elapsed_s=elapsed_s)


def not_called_in_time(parent: ServedCall, worker_name: str, function: Named) -> CallTimeout:
    """Returns the error of a nested call for which no time is left."""
    name = function_name(function)
    text = f"{name} on worker {worker_name!r} was not called: {_late_with(parent)}"
    return CallTimeout(text, worker=worker_name, call=name)


def _late_with(parent: ServedCall) -> str:
    return (
        f"the limit was that of worker {parent.peer.name!r}, for whose call it was made and which "
        "waits no longer. Pass a longer timeout= there"
    )


def parent_cancelled(parent: ServedCall, worker_name: str, function: Named) -> CallCancelled:
    """Returns the error of a nested call whose parent was cancelled."""
    name, caller = function_name(function), parent.peer.name
    return CallCancelled(
        f"{name} on worker {worker_name!r} was called for worker {caller!r}, which has given up or "
        "is lost; call it within torchweft.rpc.detached() if it is to run all the same",
        worker=worker_name,
        call=name,
    )


def interrupted(call: OpenCall) -> CallCancelled:
    """Returns the error of a call whose caller was interrupted while it read the answer."""
    name = function_name(call.function)
    return CallCancelled(
        f"the caller was interrupted while it read the answer of {name} on worker "
        f"{call.worker_name!r}, which is lost",
        worker=call.worker_name,
        call=name,
    )


def ended_unsent(call: OpenCall) -> CallCancelled:
    """Returns the error of a request that is not sent because its call has ended."""
    name = function_name(call.function)
    text = f"the call of {name} on worker {call.worker_name!r} ended before it was sent"
    return CallCancelled(text, worker=call.worker_name, call=name)


def too_many_waiting(worker_name: str, caller_name: str) -> QueueFull:
    """Returns the error of a call that its callee refuses, as too many calls wait there."""
    return QueueFull(
        f"worker {worker_name!r} has too many calls of worker {caller_name!r} waiting and refuses "
        "more; wait for some answers before the next call, or raise "
        f"{knobs.QUEUE_LIMIT_CALLS.variable} or {knobs.QUEUE_LIMIT_BYTES.variable} there",
        worker=worker_name,
    )


def not_sendable(worker_name: str, failure: BaseException) -> SerializationError:
    """Returns the error of a call whose result its callee could not send."""
    return SerializationError(
        f"worker {worker_name!r} could not send the result of the call: {type(failure).__name__} "
        "was raised meanwhile; its log says more"
    )


def no_future(function: str, result: object) -> ConfigurationError:
    """Returns the error of a function that must return a future, and returned ``result``."""
    return ConfigurationError(
        "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
        f"but {function}, marked by async_execution, returned a {type(result).__name__}"
    )


def function_name(function: Named) -> str:
    """Returns a readable name of the called function, for messages."""
    if isinstance(function, tuple):
        describe, *arguments = function
        return str(describe(*arguments))
    if isinstance(function, bytes):
        return function.decode("utf-8", "backslashreplace")
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    module = getattr(function, "__module__", None)
    if name is None:
        return repr(function)
    return f"{module}.{name}" if module else str(name)
