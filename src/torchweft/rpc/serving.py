"""Serves calls from other workers: runs the functions and sends the answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from torchweft import knobs
from torchweft.agent.peers import Peer
from torchweft.agent.references import OwnedValue
from torchweft.agent.served_calls import current_call
from torchweft.agent.tensor_messages import TensorMessage
from torchweft.arguments import did_you_mean
from torchweft.autograd.contexts import enter, set_current_id
from torchweft.autograd.outside import NO_GRAD
from torchweft.errors import (
    ArgumentTypeError,
    AutogradError,
    ProtocolError,
    QueueFull,
    UnknownFunction,
)
from torchweft.protocol.calls import SLOW_S
from torchweft.rpc.completion import Call, WhenReady, settle
from torchweft.rpc.current_call import reference_in
from torchweft.rpc.worker import Worker, current_worker
from torchweft.serialize.functions import resolve
from torchweft.serialize.registry import remotely_callable
from torchweft.wire.messages import (
    COMPACT,
    CallHead,
    decode_call_head,
    decode_compact_call,
)

_log = logging.getLogger("torchweft")

NO_ARGUMENTS = "the arguments of a call are a tensor, which would be taken apart row by row"
"""A tensor of few bytes may have any number of rows."""


def install(worker: Worker) -> None:
    """Makes ``worker`` serve calls."""

    def serve(peer: Peer, call: Call) -> None:
        call.worker, call.owned = worker, None
        assert call.frame is not None
        try:
            if call.frame.flags == COMPACT:
                _serve_compact(worker, peer, call)
            else:
                _serve_tensor_message(worker, peer, call)
        except ProtocolError as error:  # Errors of the function are its answer.
            worker.agent.receiver.turn_away(peer, error)
        except BaseException as error:  # Before the function ran, or after it answered.
            call.fail(error)

    def refuse(peer: Peer, call: Call) -> None:
        try:
            _refuse(worker, peer, call)
        except ProtocolError as error:
            worker.agent.receiver.turn_away(peer, error)
        except BaseException as error:
            call.fail(error)

    worker.agent.receiver.on_calls(serve, refuse, Call)


def cancel_creations(worker: Worker, peer: Peer) -> None:
    """Cancels calls that make values for a lost worker, if no other reference to them exists.

    The ``ReferenceKeeper`` must have been told of the loss.
    """
    making = [call for call in worker.unfinished.copy() if isinstance(call, Call)]
    worker.agent.cancelling.end_creations(making, peer)


def _serve_tensor_message(worker: Worker, peer: Peer, call: Call) -> None:
    """Runs one call; its errors become its answer."""
    frame, call.frame = call.frame, None
    assert frame is not None
    message = worker.tensor_messages.read(frame)
    del frame
    head = decode_call_head(message.head)
    call.function, call.context_id = head.function, head.context_id
    if not call.begins(head.creation, head.remaining_s, time.monotonic()):
        worker.tensor_messages.discard(peer, message)
        worker.refuse(peer, head.references, head.context_id, head.message_id)
        return
    if message.channel_table:
        try:
            worker.tensor_messages.fetch(peer, message)
        except Exception as error:
            worker.refuse(peer, head.references, head.context_id, head.message_id)
            call(None, error)
            return
    was_slow = head.function in worker.slow
    if was_slow or not head.function:
        worker.agent.reactor.arm_all()
    began_s = time.monotonic()
    before = current_call.set(call)
    try:
        if not head.context_id or head.context_id == NO_GRAD:
            _run(worker, peer, head, message, call)
            return
        with enter(head.context_id):
            _run(worker, peer, head, message, call)
    finally:
        current_call.reset(before)
        if was_slow != (time.monotonic() - began_s > SLOW_S):
            worker.slow.note(head.function, was_slow=was_slow)


def _refuse(worker: Worker, peer: Peer, call: Call) -> None:
    """Refuses a call because too many calls wait; gives its references back."""
    name = worker.agent.info.name
    frame, call.frame = call.frame, None
    assert frame is not None
    call.worker, call.owned = worker, None
    error = QueueFull(
        f"worker {name!r} has too many calls of worker {peer.name!r} waiting and refuses more; "
        f"wait for some answers before the next call, or raise {knobs.QUEUE_LIMIT_CALLS.variable} "
        f"or {knobs.QUEUE_LIMIT_BYTES.variable} there",
        worker=name,
    )
    if frame.flags == COMPACT:
        remaining_s, creation, context_id, message_id, *_ = decode_compact_call(frame.control)
        worker.give_back(peer, context_id, message_id)
    else:
        message = worker.tensor_messages.read(frame)
        head = decode_call_head(message.head)
        remaining_s, creation, context_id = head.remaining_s, head.creation, head.context_id
        worker.tensor_messages.discard(peer, message)
        worker.refuse(peer, head.references, head.context_id, head.message_id)
    call.context_id = context_id
    if call.begins(creation, remaining_s, time.monotonic()):
        call(None, error)


def _serve_compact(worker: Worker, peer: Peer, call: Call) -> None:
    frame, call.frame = call.frame, None
    assert frame is not None
    remaining_s, creation, context_id, message_id, name, start = decode_compact_call(frame.control)
    began_s = time.monotonic()
    call.function = name
    call.context_id = context_id
    if not call.begins(creation, remaining_s, began_s):
        worker.give_back(peer, context_id, message_id)
        return
    was_slow = name in worker.slow
    if was_slow:
        worker.agent.reactor.arm_all()
    entered_id = 0 if context_id == NO_GRAD else context_id
    if entered_id:
        set_current_id(entered_id)
    before = current_call.set(call)
    try:
        args = worker.open_values(peer, frame.control, start, context_id, message_id)
        function = worker.reader.resolve(name)
        result = function(*args)
        del args
    except BaseException as error:
        call(None, error)
    else:
        settle(worker, entered_id, function, result, call)
    finally:
        current_call.reset(before)
        if entered_id:
            set_current_id(0)
        if was_slow != (time.monotonic() - began_s > SLOW_S):
            worker.slow.note(name, was_slow=was_slow)


def _run(worker: Worker, peer: Peer, head: CallHead, message: TensorMessage, call: Call) -> None:
    try:
        content = worker.open_content(
            peer, message, head.references, head.context_id, head.message_id
        )
        if isinstance(content, torch.Tensor):
            raise ArgumentTypeError(NO_ARGUMENTS)
        if head.function:
            find = resolve if message.is_local else worker.reader.resolve
            (args, kwargs), function = content, find(head.function)
        else:
            args, kwargs, function = content
            if not message.is_local:
                worker.reader.check_called(function)
            call.function = function
        if isinstance(args, torch.Tensor):
            raise ArgumentTypeError(NO_ARGUMENTS)
        del content
        message.buffers = ()  # Free them with the arguments, before an equally large answer.
        result = function(*args, **kwargs)
        del args, kwargs
    except BaseException as error:
        call(None, error)
        return
    entered_id = 0 if head.context_id == NO_GRAD else head.context_id
    settle(worker, entered_id, function, result, call)


# Functions that other workers call by name: see torchweft.rpc.calls.


@remotely_callable
def fetch(reference: tuple[int, int, int]) -> WhenReady:
    """Returns the value behind a reference of this worker."""
    return WhenReady(owned(reference), lambda value: (fetch, value))


@remotely_callable
def call_method(
    reference: tuple[int, int, int], name: str, args: Any, kwargs: dict[str, Any], kept: object
) -> WhenReady:
    """Calls a method of the value behind a reference of this worker.

    ``kept`` is the reference itself, for calls whose caller may not keep it meanwhile.
    """
    if isinstance(args, torch.Tensor):
        raise ArgumentTypeError(NO_ARGUMENTS)

    def call(value: Any) -> tuple[Callable[..., Any], Any]:
        method = method_of(value, name)
        served = current_call.get()
        if served is not None:
            served.function = method
        return method, method(*args, **kwargs)

    return WhenReady(owned(reference), call, kept)


def method_of(value: Any, name: str) -> Any:
    """Returns a method of a value of this worker, for the call that this thread serves.

    Raises:
        NotAllowed: The caller is another worker, which may not call the method.
        UnknownFunction: The value has no method of that name.
    """
    served = current_call.get()
    is_own = served is None or served.peer.is_self
    try:
        return getattr(value, name) if is_own else current_worker().reader.method_of(value, name)
    except AttributeError as error:
        names = dir(value)
        if name in names:
            raise  # The attribute exists: the program's code behind it raised the error.
        kind = type(value).__name__
        text = f"{error}{did_you_mean(name, names)}"
        raise UnknownFunction(text, call=f"{kind}.{name}") from None


@remotely_callable
def backward_from(
    reference: tuple[int, int, int], context_id: int, retain_graph: bool
) -> WhenReady:
    """Runs a backward pass from the value behind a reference of this worker."""

    def run(value: Any) -> tuple[Callable[..., Any], None]:
        run_backward(current_worker(), value, context_id, retain_graph)
        return backward_from, None

    return WhenReady(owned(reference), run)


def run_backward(worker: Worker, value: Any, context_id: int, retain_graph: bool) -> None:
    """Runs a backward pass from a value of this worker, in a context or (-1) locally."""
    if not isinstance(value, torch.Tensor):
        raise AutogradError(
            "RRef should contain a tensor for .backward(); this one refers to a "
            f"{type(value).__name__}"
        )
    if context_id < 0:
        torch.autograd.backward([value], retain_graph=retain_graph)
    else:
        worker.engine.backward(context_id, [value], retain_graph=retain_graph)


def owned(reference: tuple[int, int, int]) -> OwnedValue:
    """Returns the value of this worker behind a reference, which the caller keeps."""
    worker = current_worker()
    target = reference_in(reference)
    if target.owner != worker.agent.me.id:
        raise ProtocolError(f"{target} was asked of worker {worker.agent.info.name!r}")
    return worker.references.value_of(target)
