"""Serves calls from other workers: runs the functions and sends the answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torchweft.agent.peers import Peer
from torchweft.agent.receiving import size_of
from torchweft.agent.references import OwnedValue
from torchweft.agent.served_calls import current_call
from torchweft.agent.tensor_messages import LocalMessage, TensorMessage
from torchweft.arguments import did_you_mean
from torchweft.autograd.contexts import set_current_id
from torchweft.errors import (
    ArgumentTypeError,
    AutogradError,
    ProtocolError,
    UnknownFunction,
)
from torchweft.protocol.calls import SLOW_S, failures
from torchweft.rpc.completion import Call, CallWithCode, WhenReady, settle
from torchweft.rpc.current_call import reference_in
from torchweft.rpc.worker import Around, Worker, current_worker
from torchweft.serialize.functions import resolve
from torchweft.serialize.registry import remotely_callable
from torchweft.serialize.values import split_names
from torchweft.wire.frames import Frame
from torchweft.wire.messages import (
    CAPTURED,
    NAMED,
    NO_GRAD,
    POSITIONAL,
    TABLES,
    Kind,
    ValueHead,
    decode_call,
    decode_code_names,
    decode_span,
)

_log = logging.getLogger("torchweft")

_new = tuple.__new__  # The named tuple's own constructor is Python code.
_CALL = int(Kind.CALL)

NO_ARGUMENTS = "the arguments of a call are a tensor, which would be taken apart row by row"
"""A tensor of few bytes may have any number of rows."""


def install(worker: Worker) -> ServedTypes:
    """Makes ``worker`` serve calls; returns the types of the objects that it makes of them."""

    def handled_by(
        handle: Callable[[Worker, Peer, Call], None],
    ) -> Callable[[Peer, Call], None]:
        def handler(peer: Peer, call: Call) -> None:
            call.worker, call.owned = worker, None
            try:
                handle(worker, peer, call)
            except ProtocolError as error:  # Errors of the function are its answer.
                worker.agent.receiver.turn_away(peer, error)
            except BaseException as error:  # Before the function ran, or after it answered.
                call.fail(error)

        return handler

    def take_up(peer: Peer, frame: Frame, context: bytes = b"") -> None:
        numbers, control = decode_code_names(frame.control)
        codes = peer.kept_codes.find(numbers)
        plain = _new(Frame, (_CALL, frame.flags, frame.id, control, frame.buffers))
        call = types.with_code(peer, plain, time.monotonic())
        call.codes = codes
        size_bytes = size_of(frame)
        for code in codes:
            size_bytes += code.size_bytes
        if context and types.take_context is not None:
            types.take_context(call, context)
        worker.agent.receiver.take_call(peer, call, size_bytes)

    def take_up_in_span(peer: Peer, frame: Frame) -> None:
        control: Any = frame.control
        kind, context, control = control if type(control) is InSpan else decode_span(control)
        plain = _new(Frame, (kind, frame.flags, frame.id, control, frame.buffers))
        if kind != _CALL:
            if worker.reader.is_strict:
                raise ProtocolError(f"message kind {kind} is unknown")
            take_up(peer, plain, context)
            return
        call = types.plain(peer, plain, time.monotonic())
        if types.take_context is not None:
            types.take_context(call, context)
        worker.agent.receiver.take_call(peer, call, size_of(plain))

    serve = handled_by(_serve)
    types = ServedTypes(worker, serve)
    worker.agent.receiver.on_calls(serve, handled_by(_refuse), Call)
    worker.agent.receiver.on(Kind.CALL_IN_SPAN, take_up_in_span, inline=True)
    if not worker.reader.is_strict:
        worker.agent.receiver.on(Kind.CALL_WITH_CODE, take_up, inline=True)
    return types


class InSpan(NamedTuple):
    """Takes the place of the control part of a ``CALL_IN_SPAN`` of a worker to itself.

    Attributes:
        kind: ``CALL``.
        context: The context of the span.
        control: The control part of the call.
    """

    kind: int
    context: bytes
    control: Any


class ServedTypes:
    """The types of the objects that a worker makes of the calls that it reads.

    Args:
        worker: The worker.
        serve: Serves a call of any of them.

    Attributes:
        plain: The type for calls without functions by value.
        with_code: The type for calls with functions by value.
        take_context: Takes the context that a call carries; None to drop it.
    """

    def __init__(self, worker: Worker, serve: Callable[[Peer, Call], None]) -> None:
        self._receiver = worker.agent.receiver
        self._serve = serve
        self.plain, self.with_code = Call, CallWithCode
        self.take_context: Callable[[Call, bytes], None] | None = None

    def use(
        self, plain: type[Call], with_code: type[CallWithCode], around: Around | None = None
    ) -> None:
        """Uses other types from now on.

        Args:
            plain: The type for calls without functions by value.
            with_code: The type for calls with functions by value.
            around: Runs what serves a call; None to run it as it is.
        """
        serve = self._serve

        def serve_within(peer: Peer, call: Call) -> None:
            assert around is not None
            around(call, partial(serve, peer, call))

        self.plain, self.with_code = plain, with_code
        self._receiver.take_up_as(plain, serve if around is None else serve_within)


def _serve(worker: Worker, peer: Peer, call: Call) -> None:
    """Runs one call; its errors become its answer."""
    frame, call.frame = call.frame, None
    assert frame is not None
    flags = frame.flags
    control: Any = frame.control
    is_local = type(control) is LocalMessage
    remaining_s, creation, name, head = control.head if is_local else decode_call(control)
    message = worker.tensor_messages.read(frame) if flags & TABLES else None
    del frame
    codes = call.codes
    call.function, call.context_id = name, (context_id := head[0])
    began_s = time.monotonic()
    if not call.begins(creation, remaining_s, began_s):
        _give_back(worker, peer, head, message)
        return
    if message is not None and not _fetch(worker, peer, call, head, message):
        return
    was_slow = name in worker.slow
    if was_slow or not (name or (codes and not codes[0].is_slow)):
        worker.agent.reactor.arm_all()
    entered_id = 0
    if context_id and context_id != NO_GRAD:
        entered_id = context_id
        set_current_id(entered_id)
    current_call.set(call)  # Never reset: each task has a Python context of its own.
    try:
        find: Callable[[bytes], Any] = resolve if is_local else worker.reader.resolve
        if is_local:
            content = worker.decoder.open_own(control, context_id)
        else:
            content = worker.decoder.open(peer, control, head, message, False, codes)
        del control, message  # Free them with the arguments.
        if name and flags & POSITIONAL and type(content) is tuple:
            function = find(name)
            result = function(*content)
        else:
            args, kwargs, function = _parts(worker, call, content, name, flags, find)
            del content
            result = function(*args, **kwargs)
            del args, kwargs
        content = None
    except BaseException as error:
        call(None, error)
    else:
        settle(worker, entered_id, function, result, call)
    finally:
        is_slow = time.monotonic() - began_s > SLOW_S
        if was_slow != is_slow:
            worker.slow.note(name, was_slow=was_slow)
        if codes:
            call.codes = ()  # type: ignore[misc]  # The call may go on for days.
            if not name:
                codes[0].is_slow = is_slow


def _parts(
    worker: Worker,
    call: Call,
    content: Any,
    name: bytes,
    flags: int,
    find: Callable[[bytes], Any],
) -> tuple[Sequence[Any], dict[str, Any], Callable[..., Any]]:
    """Returns the arguments and the function of a call."""
    kwargs: dict[str, Any] = {}
    if isinstance(content, torch.Tensor):
        raise ArgumentTypeError(NO_ARGUMENTS)
    if flags & CAPTURED and call.codes:
        args, kwargs = (content, kwargs) if flags & POSITIONAL else content
        if isinstance(args, torch.Tensor):
            raise ArgumentTypeError(NO_ARGUMENTS)
        function, args = worker.reader.bind(call.codes[0], tuple(args))
        call.function = function
    elif flags & POSITIONAL:
        args, function = content, find(name)
    elif flags & NAMED:
        (args, kwargs), function = split_names(content), find(name)
    elif name:
        (args, kwargs), function = content, find(name)
    else:
        args, kwargs, function = content
        if not call.peer.is_self:
            worker.reader.check_called(function)
        call.function = function
    if isinstance(args, torch.Tensor):
        raise ArgumentTypeError(NO_ARGUMENTS)
    return args, kwargs, function


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
    remaining_s, creation, _, head = control.head if is_local else decode_call(control)
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
