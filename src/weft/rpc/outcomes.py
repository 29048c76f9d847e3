"""What becomes of a call of another worker: its answer, or a value of this worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import CoroutineType
from typing import Any, NamedTuple

import torch

from weft.agent.references import OwnedValue
from weft.agent.served_calls import ServedCall, current_call
from weft.autograd.contexts import enter
from weft.errors import CallCancelled, ConfigurationError
from weft.ids import ReferenceId
from weft.rpc.functions import is_async_execution
from weft.rpc.worker import Worker
from weft.serialize.exceptions import pack_error, unpack_error
from weft.serialize.functions import describe


class WhenReady(NamedTuple):
    """What a function returns whose work begins when a value of this worker is ready.

    No thread waits meanwhile.
    """

    owned: OwnedValue
    then: Callable[[Any], Any]
    kept: object = None


class Call(ServedCall):
    """A call of another worker; called with the outcome, it replies or makes it a value here."""

    __slots__ = ("context_id", "owned", "reference", "worker")

    worker: Worker
    context_id: int
    owned: OwnedValue | None
    reference: ReferenceId

    def __call__(self, result: Any, error: BaseException | None) -> None:
        """Ends it with its outcome."""
        worker = self.worker
        if self.owned is not None:
            self._keep(self.owned, result, error)
        elif self.was_cancelled:
            pass  # Nobody waits. What the result refers to was not handed on yet.
        elif error is None:
            worker.reply(self.peer, self.number, result, self.context_id)
        else:
            worker.reply_error(self.peer, self.number, error)
        # As ``end``, without calling it.
        if self.number and not self.has_ended:
            del self.peer.served[self.number]
        self.has_ended = True
        self._on_cancel = None

    def _keep(self, owned: OwnedValue, result: Any, error: BaseException | None) -> None:
        if error is not None:
            if self.worker.on_failure is not None:
                self.worker.on_failure(self.peer, error)
            # As its users will get it: the original's traceback would keep what its frames hold.
            error = unpack_error(pack_error(error, self.worker.agent.info.name))
        owned.resolve(result, error)
        self.worker.unfinished.discard(self)
        self.owned = None  # Futures of nested calls may outlive the value.

    def create(self, worker: Worker, creation: int) -> bool:
        """Has the outcome become a value here; returns False where it is not to be made."""
        self.reference = ReferenceId(self.peer.id, worker.agent.me.id, creation)
        self.owned = worker.references.created(self.reference)
        if self.owned is None:
            self.end()
            return False
        worker.unfinished.add(self)
        return True

    def is_unwanted(self, now_s: float) -> bool:
        """Whether nobody waits for it; where it makes a value, whether nobody can want that."""
        if self.number:
            return super().is_unwanted(now_s)
        return self.peer.lost is not None and not self.worker.references.is_owned(self.reference)


def settle(
    worker: Worker, context_id: int, function: Callable[..., Any], result: Any, call: Call
) -> None:
    """Finishes a call with what its function returned, now or when that has come about."""
    if is_async_execution(function):
        _finish_with_future(worker, function, result, call)
    elif isinstance(result, CoroutineType):
        cancel = worker.coroutines.run(result, context_id, call)
        if cancel is not None:
            call.on_cancel(cancel)
    elif type(result) is WhenReady:
        _finish_when_ready(worker, context_id, result, call)
    else:
        call(result, None)


def _finish_with_future(
    worker: Worker, function: Callable[..., Any], result: Any, call: Call
) -> None:
    if not isinstance(result, torch._C.Future):
        name = describe(function)
        call(
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
            call(None, error)
        else:
            call(value, None)

    result.then(pass_on)


def _finish_when_ready(worker: Worker, context_id: int, waiting: WhenReady, call: Call) -> None:
    def proceed(owned: OwnedValue, _: object = None) -> None:
        if owned.error is not None:
            call(None, owned.error)
            return
        before = current_call.set(call)
        try:
            _check_wanted(call)
            with enter(context_id):
                function, result = waiting.then(owned.value)
        except BaseException as error:
            call(None, error)
        else:
            settle(worker, context_id, function, result, call)
        finally:
            current_call.reset(before)

    def ready(owned: OwnedValue) -> None:
        # The thread that makes the value has its own work to do.
        worker.agent.reactor.submit_task(proceed, owned)

    def give_up(owned: OwnedValue, _: object) -> None:
        if owned.forget(ready):
            call(None, CallCancelled("the caller has given the call up"))

    owned = waiting.owned
    if owned.is_ready:
        proceed(owned)
    else:
        owned.when_ready(ready)
        # As a task, for what waits there goes, and with it who knows what.
        call.on_cancel(lambda: worker.agent.reactor.submit_task(give_up, owned))


def _check_wanted(call: Call) -> None:
    """Raises where nobody waits for a call any more, so that it need not go on."""
    if call.is_unwanted(time.monotonic()):
        raise CallCancelled("the caller of this call waits no longer")
