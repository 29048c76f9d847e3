"""Makes calls of functions, and of the values behind references.

Calls are events of PyTorch's profilers, named as PyTorch names them. An event belongs to the
caller: only a profiler on the callee records what the callee does meanwhile. The event of
``rpc_sync`` and ``rpc_async`` lasts until the call has ended; that of ``remote`` until the call was
sent, since no answer is awaited. A class of references may watch the making of the value, and end
the event then (``Handle.end_event``). A call looks at
``torch.autograd.profiler._is_profiler_enabled``, which is True during a profile of this or any
other thread: that is one look at a variable, and no function.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import torch
from torch.autograd import profiler
from torch.autograd.profiler import record_function

from torchweft.arguments import kind_of, limit_of, wrong_type
from torchweft.engine.codec.functions import text_of
from torchweft.engine.protocol.calls import Subject, nest
from torchweft.engine.worker import current as of_process
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.calls import PendingCall, current_call
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.references import Handle
from torchweft.errors import ArgumentTypeError, CallCancelled, WorkerLost
from torchweft.ids import WorkerInfo
from torchweft.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.rpc.encoding import Request
from torchweft.rpc.futures import Future
from torchweft.rpc.worker import WORKER, Worker

Destination = str | int | WorkerInfo

FETCH = b"torchweft.rpc.serving:fetch"
CALL_METHOD = b"torchweft.rpc.serving:call_method"
BACKWARD_FROM = b"torchweft.rpc.serving:backward_from"
HAS_JOINED = b"torchweft.rpc.serving:has_joined"


def use(
    reference: Handle, way: str, entry: Any, args: Any, kwargs: Any, timeout: float, name: str
) -> Any:
    """Calls the owner of the value behind a reference, in one of the three ways.

    Args:
        reference: The reference.
        way: ``sync``, ``async`` or ``remote``.
        entry: A function that takes the parts of the reference, what keeps it, and ``args``.
        args: Further arguments.
        kwargs: Keyword arguments.
        timeout: As for ``rpc_sync``.
        name: The name of the use, for messages and profilers.

    Raises:
        OwnerLost: The owner is lost.
    """
    agent = reference.agent()
    worker = agent.slots[WORKER]
    peer = agent.peers[reference.id.owner]
    # No caller waits for a ``remote`` call, so the reference itself goes along to keep the value.
    kept = reference if way == "remote" else None
    call_args = (*reference.id, kept, *args)
    subject = (worker.references.describe_use, reference.id, name)
    try:
        result = _WAYS[way](worker, peer, entry, call_args, kwargs, timeout, subject)
    except WorkerLost as error:
        if peer.lost is None or error.worker != peer.name:
            raise  # By the function that was to make the value, or by the method.
        raise worker.references.owner_lost(reference.id) from None
    if way == "async":
        result.kept = reference  # until it is answered
    return result


def has_joined(worker: Worker, peer: Peer, timeout: float) -> bool:
    """Returns whether all workers know ``peer`` that were present when it came. Blocks."""
    known: bool = call_and_wait(worker, peer, HAS_JOINED, (), {}, timeout)
    return known


def reach(to: Destination) -> tuple[Agent, Peer]:
    """Returns the agent of this process, and the worker that a name, rank or ``WorkerInfo`` means.

    Raises:
        NotInitialized: See ``worker.current.current``.
        UnknownWorker: There is no such worker; see ``Members.find``.
    """
    agent = of_process.here or of_process.current()
    peer = agent.peers_by_name.get(to) if type(to) is str else None
    return agent, peer or agent.find(to)


def checked_call(
    function: Callable[..., Any], args: Sequence[Any] | None, kwargs: dict[str, Any] | None
) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """Returns the function and its normalized arguments, or raises ArgumentTypeError."""
    if not callable(function):
        fix = "pass the function itself, and its arguments as args=(...)"
        raise wrong_type("func", function, fix)
    if args is None:
        args = ()
    elif not isinstance(args, (tuple, list)):
        fix = "pass a tuple, args=(value,) for a single argument"
        raise ArgumentTypeError(f"args is {kind_of(args)}; {fix}")
    if kwargs is None:
        kwargs = {}
    elif not isinstance(kwargs, dict):
        raise wrong_type("kwargs", kwargs, "pass a dict")
    return function, args, kwargs


def _new_call(worker: Worker, peer: Peer, called: Any, timeout: float) -> tuple[PendingCall, bytes]:
    """Returns a call that will be answered, and the span that it carries.

    Raises:
        CallCancelled: It would be part of a call that was given up.
    """
    limit_s = worker.agent.default_timeout_s
    if timeout is not UNSET_RPC_TIMEOUT:
        limit_s = limit_of(timeout, limit_s)
    parent = current_call.get()
    if parent is not None:
        parent, limit_s = nest(parent, peer.name, called, limit_s, monotonic())
    call = PendingCall(peer.id, peer.name, called, limit_s, None, parent)
    return call, worker.note_call(call) if worker.watchers else b""


def call_and_wait(
    worker: Worker,
    peer: Peer,
    function: Any,
    args: Sequence[Any],
    kwargs: Any,
    timeout: float,
    subject: Subject | str | None = None,
) -> Any:
    """Calls ``peer``, waits for the answer, and returns the result. Blocks."""
    called, event = subject or function, None
    if profiler._is_profiler_enabled:
        event = begin_event(RPCExecMode.SYNC, worker.agent.info.name, peer, called)
    call, span = _new_call(worker, peer, called, timeout)
    request = worker.encoder.request(peer, function, args, kwargs, call.timeout_s, span=span)
    try:
        answer = worker.agent.calls.ask_and_wait(peer, call, request, worker.decoder.natively())
    except BaseException as error:  # It could not be sent, or a signal handler has raised.
        if call.number and call.error is None:
            worker.agent.calls.cancel(call, CallCancelled("interrupted", worker=peer.name))
            frame, call.frame = call.frame, None
            if frame is not None:
                worker.discard_reply(peer, frame)
        # The callee may have a message that has a number.
        _take_back(call, request, error, keeps_graph=call.number != 0)
        raise
    finally:
        if event is not None:
            event.__exit__(None, None, None)
    if answer is not None:
        return answer[0]
    try:
        return worker.result_of(call)
    except BaseException:
        if call.frame is not None:  # Ctrl-C, before the answer was looked at.
            worker.discard_reply(peer, call.frame)
        raise


def start(
    worker: Worker,
    peer: Peer,
    function: Any,
    args: Sequence[Any],
    kwargs: Any,
    timeout: float,
    subject: Subject | str | None = None,
) -> Future[Any]:
    """Starts a call on ``peer``, even if another worker has its name by now; returns a future.

    Messages name ``subject`` if it is given, otherwise the function.
    """
    called, event = subject or function, None
    if profiler._is_profiler_enabled:
        event = begin_event(RPCExecMode.ASYNC, worker.agent.info.name, peer, called)
    call, span = _new_call(worker, peer, called, timeout)
    request = worker.encoder.request(peer, function, args, kwargs, call.timeout_s, span=span)
    try:
        # References among them must outlive the call, also if the program changes ``args``.
        call.kept = (*args, *kwargs.values()) if kwargs else tuple(args)
        future: Future[Any] = Future(worker, call)
        if event is not None:
            _end_with_call(event, call)
        worker.agent.calls.ask(peer, call, request)
    except BaseException as error:
        _take_back(call, request, error)
        raise
    return future


def create(
    worker: Worker,
    peer: Peer,
    function: Any,
    args: Sequence[Any],
    kwargs: Any,
    timeout: float,
    subject: Subject | None = None,
) -> Handle:
    """Starts a call whose result stays on ``peer``; returns the reference to it.

    The value is wanted as long as a reference to it exists, so ``timeout`` is only checked.
    """
    event = None
    if profiler._is_profiler_enabled:
        event = begin_event(RPCExecMode.REMOTE, worker.agent.info.name, peer, subject or function)
    references = worker.references
    if timeout != UNSET_RPC_TIMEOUT:
        limit_of(timeout, math.inf)
    parent = current_call.get()
    if parent is not None:
        nest(parent, peer.name, subject or function, math.inf, monotonic())  # May raise.
    if peer.is_self:
        reference, _ = references.create_here()
    else:
        reference = references.creating(peer)
    try:
        maker = subject[-1] if subject else getattr(function, "__qualname__", "")
        handle = worker.reference_type.from_created(references, reference, maker)
        call = PendingCall(peer.id, peer.name, subject or function, math.inf, None, parent)
        span = worker.note_call(call) if worker.watchers else b""
        number = reference.number
        request = worker.encoder.request(peer, function, args, kwargs, math.inf, number, span)
        try:
            worker.agent.sender.send(peer, request.message(0))
        except BaseException as error:
            _take_back(call, request, error)
            raise
    except BaseException:
        if not peer.is_self:
            references.not_created(reference)
        raise
    for each in call.watchers:
        each.creation_sent(call, reference)
    if event is not None:
        handle.end_event(event)
    return handle


def _take_back(
    call: PendingCall, request: Request, error: BaseException, *, keeps_graph: bool = False
) -> None:
    """Takes back all that a call which was not sent has handed on.

    Args:
        call: The call.
        request: Its request.
        error: Why it was not sent, or is not awaited.
        keeps_graph: Whether the graph is kept, as the callee may have the message.
    """
    request.take_back(keeps_graph=keeps_graph)
    for each in call.watchers:
        each.call_fails(call, error)


_WAYS: dict[str, Callable[..., Any]] = {
    "sync": call_and_wait,
    "async": start,
    "remote": create,
}


# Events of profilers

TO_HERE = "to_here"
"""The use of a reference that PyTorch names without a way of the call."""


class RPCExecMode(enum.Enum):
    """The ways to make a call."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


def build_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Returns the name of a call's event."""
    if func_name == TO_HERE:
        return f"{TO_HERE}#({current_worker_name})->({dst_worker_name})"
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def begin_event(mode: RPCExecMode, here: str, peer: Peer, function: Any) -> record_function | None:
    """Begins the event of a call that worker ``here`` makes.

    Args:
        mode: The way of the call.
        here: Name of this worker.
        peer: The callee.
        function: The function, its name, or the subject of the call. A function with the
            attribute ``has_no_event`` is a step of another call, and gets no event.
    """
    if isinstance(function, tuple):
        function = function[-1]
    elif getattr(function, "has_no_event", False):
        return None
    event = record_function(build_key(mode, _event_name(function), here, peer.name))
    event.__enter__()  # type: ignore[no-untyped-call]
    return event


def _end_with_call(event: record_function, call: PendingCall) -> None:
    """Ends an event when a call ends, before its future is seen to be done."""
    complete = call.on_done
    assert complete is not None  # set by its future
    ended: torch.futures.Future[None] = torch.futures.Future()
    event._call_end_callbacks_on_future(ended)

    def end_and_complete(call: PendingCall) -> None:
        if not ended.done():
            ended.set_result(None)
        complete(call)

    call.on_done = end_and_complete


def _event_name(function: Any) -> str:
    """Returns the name under which a profiler shows a function."""
    if isinstance(function, bytes):
        function = text_of(function).partition(":")[2]
    if isinstance(function, str):
        return function
    builtin = torch.jit._builtins._find_builtin(function)  # type: ignore[no-untyped-call]
    if builtin is not None:
        return str(builtin)
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return str(getattr(function, "__qualname__", repr(function)))
