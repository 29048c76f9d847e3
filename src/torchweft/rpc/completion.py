"""Turns the outcome of a served call into its answer, or into a value of this worker."""

from __future__ import annotations

import time
from _thread import get_ident
from collections.abc import Callable, Sequence
from functools import partial
from types import CoroutineType
from typing import Any, NamedTuple

import torch

from torchweft.agent.peers import Peer
from torchweft.agent.references import OwnedValue
from torchweft.agent.served_calls import current_call
from torchweft.autograd.contexts import enter
from torchweft.errors import SerializationError
from torchweft.ids import ReferenceId
from torchweft.protocol.calls import AnsweredCall, ServedCall, failures
from torchweft.protocol.observing.keys import call_key, making_key, reference_key
from torchweft.rpc.current_call import TAKEN
from torchweft.rpc.functions import is_async_execution
from torchweft.rpc.worker import Worker
from torchweft.runtime import device_streams
from torchweft.runtime.reports import log_exception
from torchweft.serialize.exceptions import pack_error, unpack_error
from torchweft.serialize.functions import describe


class WhenReady(NamedTuple):
    """The result of a function whose work begins when a value of this worker is ready.

    No thread waits for the value.
    """

    owned: OwnedValue
    then: Callable[[Any], Any]
    kept: object = None
    given: Sequence[Any] = ()
    """The values of the call that ``then`` uses, perhaps on another thread."""


class Call(AnsweredCall):
    """A served call; called with its outcome, it replies or makes a value of this worker."""

    __slots__ = ("awaited", "reference")

    peer: Peer
    worker: Worker
    owned: OwnedValue | None
    reference: ReferenceId
    awaited: OwnedValue
    """The value for which the call waits, or has waited; unset if it never has."""

    def failed_late(self) -> None:
        """Logs the error being handled, which came after the call had ended."""
        log_exception("a call of worker %r failed after it had ended", self.peer.name)

    def not_delivered(self, failure: BaseException) -> SerializationError:
        """Logs that the outcome could not be delivered; returns the error to deliver instead."""
        log_exception("the result of a call of worker %r could not be sent", self.peer.name)
        return failures.not_sendable(self.worker.agent.info.name, failure)

    def keep(self, result: Any, error: BaseException | None) -> None:
        """Resolves the value ``owned`` with the outcome."""
        owned = self.owned
        assert owned is not None
        if error is not None:
            self.worker.replies.note_failure(self.peer, error)
            # As its users will get it: the original's traceback would keep its frames' objects.
            is_plain = self.worker.reader.is_strict
            packed = pack_error(error, self.worker.agent.info.name, is_plain=is_plain)
            error = self.worker.as_raised_here(unpack_error(packed))
            guard = owned.guard = self.worker.unseen.guard_value(error, self.peer)
            if guard is not None and owned.was_asked_for:
                guard.was_seen = True
        owned.resolve(result, error)

    def create(self, creation: int) -> OwnedValue | None:
        """Returns the value of this worker that the outcome becomes, or None."""
        worker = self.worker
        self.reference = ReferenceId(self.peer.id, worker.agent.me.id, creation)
        return worker.references.created(self.reference)

    def is_referred_to(self) -> bool:
        """Whether any worker holds a reference to the value that the call makes."""
        return self.worker.references.is_owned(self.reference)


def key_of(call: ServedCall) -> str:
    """Returns the key of a served call for observers."""
    if call.number or not isinstance(call, Call):
        return call_key(call.peer.name, call.number)
    reference = getattr(call, "reference", None)
    return "" if reference is None else making_key(reference_key(reference))


def settle(
    worker: Worker, context_id: int, function: Callable[..., Any], result: Any, call: Call
) -> None:
    """Finishes a call with its function's result, now or when the result is ready.

    Never raises: an error from the computed attributes of a callable becomes the outcome.
    """
    try:
        if is_async_execution(function):
            _finish_with_future(worker, function, result, call)
        elif isinstance(result, CoroutineType):
            cancel = worker.coroutines.run(result, context_id, call)
            if cancel is not None:
                call.on_cancel(lambda _: cancel())
        elif type(result) is WhenReady:
            _finish_when_ready(worker, context_id, result, call)
        elif result is TAKEN:
            pass  # Its queue, or its stream, ends the call.
        else:
            call(result, None)
    except BaseException as error:
        call.fail(error)


def _finish_with_future(
    worker: Worker, function: Callable[..., Any], result: Any, call: Call
) -> None:
    if not isinstance(result, torch._C.Future):
        call(None, failures.no_future(describe(function), result))
        return

    def pass_on(done: Any) -> None:
        try:
            value = done.wait()
        except BaseException as error:
            call(None, error)
        else:
            call(value, None)

    result.then(pass_on)


def _finish_when_ready(worker: Worker, context_id: int, waiting: WhenReady, call: Call) -> None:
    mark: device_streams.Mark | None = None

    def ready(owned: OwnedValue) -> None:
        # As a task: the thread that made the value has other work to do.
        worker.agent.reactor.submit_task(go_on, owned)

    def go_on(owned: OwnedValue, _: object) -> None:
        device_streams.use(mark, *waiting.given)
        if worker.carrier is None:
            proceed(worker, context_id, waiting, call, owned)
        else:
            worker.carrier.around(call, partial(proceed, worker, context_id, waiting, call, owned))

    def give_up(owned: OwnedValue, _: object) -> None:
        if owned.forget(ready):
            call.give_up()

    owned = waiting.owned
    if owned.is_ready:
        proceed(worker, context_id, waiting, call, owned)
    else:
        call.awaited = owned
        mark = device_streams.mark()
        owned.when_ready(ready)
        # As a task: dropping the callback may finalize objects of the program.
        call.on_cancel(lambda _: worker.agent.reactor.submit_task(give_up, owned))


def proceed(
    worker: Worker, context_id: int, waiting: WhenReady, call: Call, owned: OwnedValue
) -> None:
    """Continues a call whose value is ready."""
    if not call.goes_on(owned.error, time.monotonic()):
        return
    if owned.mark is not None:
        device_streams.use(owned.mark, owned.value)
    before = current_call.set(call)
    worker.serving[get_ident()] = call
    try:
        with enter(context_id):
            function, result = waiting.then(owned.value)
    except BaseException as error:
        call(None, error)
    else:
        settle(worker, context_id, function, result, call)
    finally:
        worker.serving.pop(get_ident(), None)
        current_call.reset(before)
