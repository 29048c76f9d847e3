"""Calls from other workers: running what they ask for, and answering."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import CoroutineType
from typing import Any, NamedTuple

import torch

from weft import knobs
from weft.agent.current import current
from weft.agent.parcels import Parcel
from weft.agent.peers import Peer
from weft.agent.references import OwnedValue
from weft.autograd.contexts import enter, set_current_id
from weft.errors import AutogradError, ConfigurationError, ProtocolError, QueueFull
from weft.ids import ReferenceId
from weft.rpc.functions import is_async_execution
from weft.rpc.worker import Worker
from weft.serialize.exceptions import pack_error, unpack_error
from weft.serialize.functions import describe, resolve
from weft.wire.frames import Frame
from weft.wire.messages import (
    COMPACT,
    NO_CREATION,
    CallHead,
    Kind,
    decode_call_head,
    decode_compact_call,
)

_log = logging.getLogger("weft")

Finish = Callable[[Any, BaseException | None], None]
"""Takes the result or the error of a call."""


SLOW_S = 0.0005
"""A function that took longer the last time is slow: others need not wait while it runs."""
_SLOW_LIMIT = 4096


class WhenReady(NamedTuple):
    """What a function returns whose work begins when a value of this worker is ready.

    No thread waits meanwhile.
    """

    owned: OwnedValue
    then: Callable[[Any], Any]
    kept: object = None


def install(worker: Worker) -> None:
    """Has ``worker`` serve calls."""

    def serve(peer: Peer, frame: Frame) -> None:
        _serve(worker, peer, frame)

    def refuse(peer: Peer, frame: Frame) -> None:
        _refuse(worker, peer, frame)

    worker.agent.on(Kind.CALL, serve, inline=False, bounded=True)
    worker.agent.refuse = refuse


def _serve(worker: Worker, peer: Peer, frame: Frame) -> None:
    """Runs one call; whatever goes wrong with it becomes its answer."""
    if frame.flags == COMPACT:
        _serve_compact(worker, peer, frame)
        return
    parcel = worker.parcels.read(frame)
    head = decode_call_head(parcel.head)
    finish = _answer(worker, peer, frame.id, head.context_id, head.creation)
    if finish is None:
        worker.parcels.discard(peer, parcel)
        worker.refuse(peer, head.references)
        return
    if parcel.channel_table:
        try:
            worker.parcels.fetch(peer, parcel)
        except Exception as error:
            worker.refuse(peer, head.references)
            finish(None, error)
            return
    was_slow = head.function in worker.slow
    if was_slow or not head.function:
        worker.agent.reactor.arm_all()
    began_s = time.monotonic()
    try:
        if not head.context_id:
            _run(worker, peer, head, parcel, finish)
            return
        with enter(head.context_id):
            _run(worker, peer, head, parcel, finish)
    finally:
        if was_slow != (time.monotonic() - began_s > SLOW_S):
            _note_speed(worker, head.function, was_slow)


def _refuse(worker: Worker, peer: Peer, frame: Frame) -> None:
    """Answers a call that is not run because too many wait; its references are given back."""
    name = worker.agent.info.name
    error = QueueFull(
        f"worker {name!r} has too many calls of worker {peer.name!r} waiting and refuses more; "
        f"wait for some answers before the next call, or raise {knobs.QUEUE_LIMIT_CALLS.variable} "
        f"or {knobs.QUEUE_LIMIT_BYTES.variable} there",
        worker=name,
    )
    if frame.flags == COMPACT:
        _, creation, context_id, *_ = decode_compact_call(frame.control)
    else:
        parcel = worker.parcels.read(frame)
        head = decode_call_head(parcel.head)
        creation, context_id = head.creation, head.context_id
        worker.parcels.discard(peer, parcel)
        worker.refuse(peer, head.references)
    finish = _answer(worker, peer, frame.id, context_id, creation)
    if finish is not None:
        finish(None, error)


def _serve_compact(worker: Worker, peer: Peer, frame: Frame) -> None:
    _, creation, context_id, message_id, name, start = decode_compact_call(frame.control)
    finish = _answer(worker, peer, frame.id, context_id, creation)
    if finish is None:
        return
    was_slow = name in worker.slow
    if was_slow:
        worker.agent.reactor.arm_all()
    if context_id:
        set_current_id(context_id)
    began_s = time.monotonic()
    try:
        args = worker.open_values(peer, frame.control, start, context_id, message_id)
        function = resolve(name)
        result = function(*args)
        del args
    except BaseException as error:
        finish(None, error)
    else:
        _settle(worker, context_id, function, result, finish)
    finally:
        if context_id:
            set_current_id(0)
        if was_slow != (time.monotonic() - began_s > SLOW_S):
            _note_speed(worker, name, was_slow)


def _note_speed(worker: Worker, name: bytes, was_slow: bool) -> None:
    """Notes that a function took longer, or not as long, as it was known to."""
    if was_slow:
        worker.slow.discard(name)
    elif name and len(worker.slow) < _SLOW_LIMIT:
        worker.slow.add(name)


class _Answer:
    """What to do with the outcome of one call: reply, or make it a value of this worker."""

    __slots__ = ("_context_id", "_number", "_owned", "_peer", "_worker")

    def __init__(
        self, worker: Worker, peer: Peer, number: int, context_id: int, owned: OwnedValue | None
    ) -> None:
        self._worker = worker
        self._peer = peer
        self._number = number
        self._context_id = context_id
        self._owned = owned

    def __call__(self, result: Any, error: BaseException | None) -> None:
        worker = self._worker
        if self._owned is not None:
            self._keep(self._owned, result, error)
        elif error is None:
            worker.reply(self._peer, self._number, result, self._context_id)
        else:
            worker.reply_error(self._peer, self._number, error)

    def _keep(self, owned: OwnedValue, result: Any, error: BaseException | None) -> None:
        if error is not None:
            if self._worker.on_failure is not None:
                self._worker.on_failure(self._peer, error)
            # As its users will get it: the original's traceback would keep what its frames hold.
            error = unpack_error(pack_error(error, self._worker.agent.info.name))
        owned.resolve(result, error)
        self._worker.unfinished.discard(owned)


def _answer(
    worker: Worker, peer: Peer, number: int, context_id: int, creation: int
) -> _Answer | None:
    """Returns what to do with the outcome of a call; None where nobody wants it any more."""
    if creation == NO_CREATION:
        return _Answer(worker, peer, number, context_id, None)
    owned = worker.references.created(ReferenceId(peer.id, worker.agent.me.id, creation))
    if owned is None:
        return None
    worker.unfinished.add(owned)
    return _Answer(worker, peer, number, context_id, owned)


def _run(worker: Worker, peer: Peer, head: CallHead, parcel: Parcel, finish: Finish) -> None:
    try:
        content = worker.open_content(
            peer, parcel, head.references, head.context_id, head.message_id
        )
        if head.function:
            (args, kwargs), function = content, resolve(head.function)
        else:
            args, kwargs, function = content
        del content
        parcel.buffers = ()  # Freed with the arguments, before an answer as large is sent.
        result = function(*args, **kwargs)
        del args, kwargs
    except BaseException as error:
        finish(None, error)
        return
    _settle(worker, head.context_id, function, result, finish)


def _settle(
    worker: Worker, context_id: int, function: Callable[..., Any], result: Any, finish: Finish
) -> None:
    """Finishes a call with what its function returned, now or when that has come about."""
    if is_async_execution(function):
        _finish_with_future(worker, function, result, finish)
    elif isinstance(result, CoroutineType):
        worker.coroutines.run(result, context_id, finish)
    elif type(result) is WhenReady:
        _finish_when_ready(worker, context_id, result, finish)
    else:
        finish(result, None)


def _finish_with_future(
    worker: Worker, function: Callable[..., Any], result: Any, finish: Finish
) -> None:
    if not isinstance(result, torch._C.Future):
        name = describe(function)
        finish(
            None,
            ConfigurationError(
                "Functions decorated with @rpc.async_function must return a "
                f"torch.futures.Future object, but {name}, marked by async_execution, "
                f"returned a {type(result).__name__}"
            ),
        )
        return

    def pass_on(done: Any) -> None:
        try:
            value = done.wait()
        except BaseException as error:
            finish(None, error)
        else:
            finish(value, None)

    result.then(pass_on)


def _finish_when_ready(worker: Worker, context_id: int, waiting: WhenReady, finish: Finish) -> None:
    def proceed(owned: OwnedValue, _: object = None) -> None:
        if owned.error is not None:
            finish(None, owned.error)
            return
        try:
            with enter(context_id):
                function, result = waiting.then(owned.value)
        except BaseException as error:
            finish(None, error)
        else:
            _settle(worker, context_id, function, result, finish)

    if waiting.owned.is_ready:
        proceed(waiting.owned)
    else:
        # The thread that makes the value has its own work to do.
        waiting.owned.when_ready(lambda owned: worker.agent.reactor.submit_task(proceed, owned))


# What other workers ask for by name: see weft.rpc.calls.


def fetch(reference: tuple[int, int, int]) -> WhenReady:
    """Returns the value behind a reference of this worker."""
    return WhenReady(_owned(reference), lambda value: (fetch, value))


def call_method(
    reference: tuple[int, int, int], name: str, args: Any, kwargs: dict[str, Any], kept: object
) -> WhenReady:
    """Calls a method of the value behind a reference of this worker.

    ``kept`` is the reference itself where nobody else may keep it meanwhile.
    """

    def call(value: Any) -> tuple[Callable[..., Any], Any]:
        method = getattr(value, name)
        return method, method(*args, **kwargs)

    return WhenReady(_owned(reference), call, kept)


def backward_from(
    reference: tuple[int, int, int], context_id: int, retain_graph: bool
) -> WhenReady:
    """Runs a backward pass from the value behind a reference of this worker."""

    def run(value: Any) -> tuple[Callable[..., Any], None]:
        run_backward(_worker(), value, context_id, retain_graph)
        return backward_from, None

    return WhenReady(_owned(reference), run)


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


def _worker() -> Worker:
    return current().part(Worker)


def _owned(reference: tuple[int, int, int]) -> OwnedValue:
    worker = _worker()
    target = ReferenceId(*reference)
    if target.owner != worker.agent.me.id:
        raise ProtocolError(f"{target} was asked of worker {worker.agent.info.name!r}")
    return worker.references.value_of(target)
