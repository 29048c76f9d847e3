"""Calls to other workers: ``rpc_sync``, ``rpc_async`` and ``remote``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from weft.agent.agent import Agent
from weft.agent.calls import PendingCall
from weft.agent.current import current
from weft.agent.peers import Peer
from weft.agent.served_calls import current_call
from weft.errors import ArgumentTypeError, CallCancelled, CallTimeout, NotOwner, WorkerLost
from weft.ids import WorkerInfo
from weft.rpc import serving
from weft.rpc.current_call import nest
from weft.rpc.futures import Future
from weft.rpc.handles import UNSET_RPC_TIMEOUT, RRef
from weft.rpc.worker import Worker

T = TypeVar("T")
Destination = str | int | WorkerInfo

FETCH = b"weft.rpc.serving:fetch"
CALL_METHOD = b"weft.rpc.serving:call_method"
BACKWARD_FROM = b"weft.rpc.serving:backward_from"


def rpc_sync(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> T:
    """Runs ``func(*args, **kwargs)`` on another worker and returns its result. Blocks.

    Args:
        to: The worker: its name, its rank, or its ``WorkerInfo``; may be this one.
        func: Any callable: a function, class, method or operator, a TorchScript function, an
            ``async def``, or, by value, a lambda or closure.
        args: Its positional arguments. Tensors travel without being pickled.
        kwargs: Its keyword arguments.
        timeout: Seconds to wait at most; 0 for no limit, and by default that of the worker. In a
            function that another worker has called, at most as long as that one still waits.

    Returns:
        What the function returned. Tensors in it own their memory.

    Raises:
        UnknownWorker: There is no worker ``to``.
        CallTimeout: There was no answer in time. If the function has not begun, it will not; if
            it runs, ``is_cancelled`` tells it.
        CallCancelled: The function that makes this call was itself called, and its caller has
            given up.
        WorkerLost: The worker was lost before it answered.
        SerializationError: The callable, an argument or the result cannot travel.
        Exception: Whatever the function raised, with its remote traceback.
    """
    agent = current()
    worker: Worker = agent.parts[Worker]
    peer = agent.find(to)
    return _call_and_wait(worker, peer, *_checked(func, args, kwargs), timeout)  # type: ignore[no-any-return]


def rpc_async(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]:
    """Starts ``func(*args, **kwargs)`` on another worker and returns a future of its result.

    Arguments and errors are those of ``rpc_sync``; errors of the call itself are raised by the
    future's ``wait``. Tensors among the arguments must not be changed before the call has ended.
    """
    agent = current()
    worker: Worker = agent.parts[Worker]
    return start(worker, agent.find(to), *_checked(func, args, kwargs), timeout)


def remote(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[T]:
    """Starts ``func(*args, **kwargs)`` on another worker, which keeps the result.

    Does not wait for the function: whoever asks for the value waits for it. There is no limit to
    how long it may take, as the value is wanted for as long as somebody refers to it; give the
    limit where the value is used.

    Args:
        to: As for ``rpc_sync``.
        func: As for ``rpc_sync``.
        args: As for ``rpc_sync``.
        kwargs: As for ``rpc_sync``.
        timeout: Accepted for compatibility.

    Returns:
        A reference to the result. If the function raises, using the reference raises that.

    Raises:
        UnknownWorker: There is no worker ``to``.
        WorkerLost: The worker cannot be reached.
        SerializationError: The callable or an argument cannot travel.
    """
    agent = current()
    worker: Worker = agent.parts[Worker]
    return create(worker, agent.find(to), *_checked(func, args, kwargs), timeout)


def fetch(reference: RRef[T], timeout: float) -> T:
    """Returns a copy of the value behind a reference of another worker. Blocks."""
    agent = reference.agent()
    worker: Worker = agent.parts[Worker]
    peer = agent.peers[reference.id.owner]
    try:
        return _call_and_wait(worker, peer, FETCH, (tuple(reference.id),), {}, timeout)  # type: ignore[no-any-return]
    except WorkerLost as error:
        raise _as_owner_lost(worker, reference, peer, error) from error


def call_method(
    reference: RRef[Any], way: str, name: str, args: Any, kwargs: Any, timeout: float
) -> Any:
    """Calls a method of the value behind a reference, on its owner, in one of the three ways."""
    agent = reference.agent()
    worker: Worker = agent.parts[Worker]
    peer = agent.peers[reference.id.owner]
    # Nobody waits for a ``remote`` call, so the reference itself goes along and keeps the value.
    kept = reference if way == "remote" else None
    call_args = (tuple(reference.id), name, args, kwargs, kept)
    try:
        result = _WAYS[way](worker, peer, CALL_METHOD, call_args, {}, timeout)
    except WorkerLost as error:
        raise _as_owner_lost(worker, reference, peer, error) from error
    if way == "async":
        result.kept = reference  # until it is answered
    return result


def _as_owner_lost(
    worker: Worker, reference: RRef[Any], peer: Peer, error: WorkerLost
) -> WorkerLost:
    """Returns what to raise when a use of a reference ended with a lost worker."""
    if peer.lost is None or error.worker != peer.name:
        return error  # of the function that was to make the value, or of the method
    return worker.references.owner_lost(reference.id)


def backward_from(reference: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """Runs a backward pass from the value behind a reference, on its owner."""
    agent = reference.agent()
    worker: Worker = agent.parts[Worker]
    if reference.is_owner():
        serving.run_backward(worker, reference.local_value(), context_id, retain_graph)
        return
    if context_id < 0:
        raise NotOwner(
            "User RRefs require 'dist_autograd_ctx_id' to be specified: the value is on worker "
            f"{reference.owner_name()!r}; pass the number of an autograd context, from "
            "'with weft.autograd.context() as context_id'"
        )
    peer = agent.peers[reference.id.owner]
    args = (tuple(reference.id), context_id, retain_graph)
    _call_and_wait(worker, peer, BACKWARD_FROM, args, {}, 0.0)


def _checked(
    function: Callable[..., Any], args: Sequence[Any] | None, kwargs: dict[str, Any] | None
) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """Returns what to call and with what, or raises ArgumentTypeError."""
    if not callable(function):
        raise ArgumentTypeError(
            f"func is {function!r}, a {type(function).__name__} that cannot be called; pass the "
            "function itself, and its arguments as args=(...)"
        )
    if args is None:
        args = ()
    elif not isinstance(args, (tuple, list)):
        raise ArgumentTypeError(
            f"args is a {type(args).__name__}; pass a tuple, args=(value,) for a single argument"
        )
    if kwargs is None:
        kwargs = {}
    elif not isinstance(kwargs, dict):
        raise ArgumentTypeError(f"kwargs is a {type(kwargs).__name__}; pass a dict")
    return function, args, kwargs


def _limit_s(agent: Agent, timeout: float) -> float:
    if timeout < 0:
        return agent.default_timeout_s
    return timeout or math.inf


def _call_and_wait(
    worker: Worker, peer: Peer, function: Any, args: Sequence[Any], kwargs: Any, timeout: float
) -> Any:
    limit_s = _limit_s(worker.agent, timeout)
    parent = current_call.get()
    if parent is not None:
        parent, limit_s = nest(parent, peer, function, limit_s)
    request = worker.request(peer, function, args, kwargs, limit_s)
    call = PendingCall(peer.id, peer.name, function, limit_s, None, parent)
    try:
        worker.agent.calls.ask_and_wait(peer, call, request.message)
    except Exception:
        request.take_back()
        raise
    except BaseException:  # Ctrl-C: nobody waits any more.
        worker.agent.calls.cancel(call, CallCancelled("interrupted", worker=peer.name))
        raise
    return worker.result_of(call)


def start(
    worker: Worker, peer: Peer, function: Any, args: Sequence[Any], kwargs: Any, timeout: float
) -> Future[Any]:
    """Starts a call on ``peer``, whoever has its name by now; returns the future of its result."""
    limit_s = _limit_s(worker.agent, timeout)
    parent = current_call.get()
    if parent is not None:
        parent, limit_s = nest(parent, peer, function, limit_s)
    request = worker.request(peer, function, args, kwargs, limit_s)
    call = PendingCall(peer.id, peer.name, function, limit_s, None, parent)
    call.kept = args  # References among them must outlive the call.
    future: Future[Any] = Future(worker, call)
    try:
        worker.agent.calls.ask(peer, call, request.message)
    except CallTimeout as error:
        request.take_back()
        worker.agent.calls.fail(call, error)
    except Exception:
        request.take_back()
        raise
    return future


def create(
    worker: Worker, peer: Peer, function: Any, args: Sequence[Any], kwargs: Any, timeout: float
) -> RRef[Any]:
    """Starts a call whose result stays on ``peer``; returns the reference to it.

    The value is wanted for as long as somebody refers to it, so ``timeout`` is no limit.
    """
    references = worker.references
    parent = current_call.get()
    if parent is not None:
        nest(parent, peer, function, math.inf)  # May refuse.
    if peer.is_self:
        reference, _ = references.create_here()
    else:
        reference = references.creating(peer)
    handle = worker.reference_type.from_created(references, reference)
    try:
        request = worker.request(peer, function, args, kwargs, math.inf, reference.number)
        try:
            worker.agent.send(peer, request.message(0))
        except Exception:
            request.take_back()
            raise
    except Exception:
        if not peer.is_self:
            references.not_created(reference)
        raise
    return handle


_WAYS: dict[str, Callable[..., Any]] = {
    "sync": _call_and_wait,
    "async": start,
    "remote": create,
}
