"""Serves calls from other workers: runs the functions and sends the answers."""

from __future__ import annotations

import logging
import time
from _thread import get_ident
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torchweft.agent.peers import Peer
from torchweft.agent.references import OwnedValue
from torchweft.agent.served_calls import current_call
from torchweft.agent.tensor_messages import LocalMessage, TensorMessage
from torchweft.arguments import did_you_mean, kind_of
from torchweft.autograd.contexts import set_current_id
from torchweft.errors import (
    ArgumentTypeError,
    AutogradError,
    ProtocolError,
    UnknownFunction,
)
from torchweft.protocol.calls import SLOW_S, failures
from torchweft.rpc.completion import Call, WhenReady, settle
from torchweft.rpc.current_call import reference_in
from torchweft.rpc.worker import Worker, current_worker
from torchweft.serialize.by_value import Code, received
from torchweft.serialize.functions import resolve
from torchweft.serialize.registry import remotely_callable
from torchweft.serialize.values import split_names
from torchweft.wire.messages import (
    NAMED,
    NO_GRAD,
    TABLES,
    ValueHead,
    decode_call,
)

_log = logging.getLogger("torchweft")


def install(worker: Worker) -> None:
    """Makes ``worker`` serve calls."""

    def handled_by(
        handle: Callable[[Worker, Peer, Call], None],
    ) -> Callable[[Peer, Call], None]:
        def handler(peer: Peer, call: Call) -> None:
            call.worker, call.owned = worker, None
            try:
                if worker.watchers:
                    worker.note_serving(call)
                if worker.carrier is None:
                    handle(worker, peer, call)
                else:
                    worker.carrier.around(call, partial(handle, worker, peer, call))
            except ProtocolError as error:  # Errors of the function are its answer.
                worker.agent.receiver.turn_away(peer, error)
            except BaseException as error:  # Before the function ran, or after it answered.
                call.fail(error)

        return handler

    worker.agent.receiver.on_calls(handled_by(_serve), handled_by(_refuse), Call)


def _serve(worker: Worker, peer: Peer, call: Call) -> None:
    """Runs one call; its errors become its answer."""
    frame, call.frame = call.frame, None
    assert frame is not None
    flags = frame.flags
    control: Any = frame.control
    is_local = type(control) is LocalMessage
    remaining_s, creation, name, _, content, head = (
        control.head if is_local else decode_call(control)
    )
    if content and worker.reader.is_strict:
        raise ProtocolError("a call brings code, and this worker takes none")
    message = worker.tensor_messages.read(frame) if flags & TABLES else None
    del frame
    call.function, call.context_id = name, (context_id := head[0])
    began_s = time.monotonic()
    if not call.begins(creation, remaining_s, began_s):
        _give_back(worker, peer, head, message)
        return
    if message is not None and not _fetch(worker, peer, call, head, message):
        return
    code = received(content) if content else None
    was_slow = code.is_slow if code is not None else not name or name in worker.slow
    if was_slow:
        worker.agent.reactor.arm_all()
    entered_id = 0
    if context_id and context_id != NO_GRAD:
        entered_id = context_id
        set_current_id(entered_id)
    current_call.set(call)  # Never reset: each task has a Python context of its own.
    worker.serving[get_ident()] = call
    try:
        if is_local:
            values = worker.decoder.open_own(control, context_id)
        else:
            values = worker.decoder.open(peer, control, head, message)
        del control, message  # Free them with the arguments.
        if type(values) is not tuple:
            # A tensor of few bytes may have any number of rows, which would be taken apart.
            raise ArgumentTypeError(f"the arguments of a call are {kind_of(values)}, not a tuple")
        kwargs: dict[str, Any] = {}
        if flags & NAMED:
            values, kwargs = split_names(values)
        if name:
            function = resolve(name) if is_local else worker.reader.resolve(name)
        else:
            function, values = _by_value(worker, call, code, values)
        result = function(*values, **kwargs)
        del values, kwargs
    except BaseException as error:
        call(None, error)
    else:
        settle(worker, entered_id, function, result, call)
    finally:
        worker.serving.pop(get_ident(), None)
        is_slow = time.monotonic() - began_s > SLOW_S
        if code is not None:
            code.is_slow = is_slow
        elif was_slow != is_slow:
            worker.slow.note(name, was_slow=was_slow)


def _by_value(
    worker: Worker, call: Call, code: Code | None, values: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function of a call that has no name for it, and the arguments."""
    function: Callable[..., Any]
    if code is not None:
        function, values = worker.reader.bind(code, values)
    elif values:
        function, *rest = values
        values = tuple(rest)
        if not call.peer.is_self:
            worker.reader.check_called(function)
    else:
        raise ProtocolError("a call has neither a name nor a function")
    call.function = function
    return function, values


def _fetch(worker: Worker, peer: Peer, call: Call, head: ValueHead, message: TensorMessage) -> bool:
    """Fetches the tensors of a call; if that fails, answers the call and returns False."""
    try:
        worker.tensor_messages.fetch(peer, message)
    except Exception as error:
        worker.decoder.refuse(peer, head)
        call(None, error)
        return False
    return True


def _give_back(worker: Worker, peer: Peer, head: ValueHead, message: TensorMessage | None) -> None:
    """Releases the tensors, references and graph of a call that will not run."""
    if message is not None:
        worker.tensor_messages.discard(peer, message)
    worker.decoder.refuse(peer, head)


def _refuse(worker: Worker, peer: Peer, call: Call) -> None:
    """Refuses a call because too many calls wait; gives its references back."""
    frame, call.frame = call.frame, None
    assert frame is not None
    control: Any = frame.control
    message = worker.tensor_messages.read(frame) if frame.flags & TABLES else None
    is_local = isinstance(control, LocalMessage)
    remaining_s, creation, *_, head = control.head if is_local else decode_call(control)
    _give_back(worker, peer, head, message)
    call.context_id = head[0]
    error = failures.too_many_waiting(worker.agent.info.name, peer.name)
    call.refuse(creation, remaining_s, time.monotonic(), error)


# Functions that other workers call by name: see torchweft.rpc.calls.


@remotely_callable
def has_joined() -> bool:
    """Returns whether all workers that were present know this worker.

    It serves calls before: the first to know it need not wait for the others.
    """
    return current_worker().agent.lifetime.has_joined


@remotely_callable
def fetch(creator: int, owner: int, number: int) -> WhenReady:
    """Returns the value behind a reference of this worker, whose parts are given."""
    return WhenReady(owned((creator, owner, number)), lambda value: (fetch, value))


@remotely_callable
def call_method(
    creator: int, owner: int, number: int, name: str, kept: object, /, *args: Any, **kwargs: Any
) -> WhenReady:
    """Calls a method of the value behind a reference of this worker, whose parts are given.

    ``kept`` is the reference itself, for calls whose caller may not keep it meanwhile.
    """
    reference = creator, owner, number

    def call(value: Any) -> tuple[Callable[..., Any], Any]:
        method = method_of(value, name)
        served = current_call.get()
        if served is not None:
            served.function = method
        return method, method(*args, **kwargs)

    return WhenReady(owned(reference), call, kept, (args, kwargs))


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
