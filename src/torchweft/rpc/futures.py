"""The future of a remote call: a real ``torch.futures.Future`` that can be awaited as well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from contextvars import Context, copy_context
from functools import partial
from typing import Any, TypeVar, cast

import torch

from torchweft.agent.calls import PendingCall
from torchweft.errors import CallCancelled
from torchweft.protocol.calls import failures
from torchweft.rpc.ordered_futures import OrderedFuture, begin, fail, raise_copy
from torchweft.rpc.unseen import Guard
from torchweft.rpc.worker import Worker
from torchweft.runtime import device_streams
from torchweft.serialize.tracebacks import drop_frames, shorten

T = TypeVar("T")
S = TypeVar("S")

__all__ = ["Future", "fail", "ignore_errors", "open_calls"]


class Future(OrderedFuture[T]):
    """The result of a remote call, which may still be running.

    Works with ``then``, ``add_done_callback``, ``torch.futures.collect_all`` and ``wait_all``;
    callbacks run on a thread of the worker. Works with ``await`` and ``asyncio.wait``. Thread-safe.
    """

    # Thousands may wait at a time: a dictionary in each would make garbage collection long.
    __slots__ = ("_call", "_guard", "_variables", "_worker", "is_watched", "kept")

    def __init__(self, worker: Worker, call: PendingCall) -> None:
        if device_streams.HAS_CUDA:
            begin(self)
        else:
            torch._C.Future.__init__(self, [])
        self._worker = worker
        self._call = call
        self.kept: object = None
        """An object that must live until the call has ended."""
        self.is_watched = False
        """Whether an error needs no report even if the value is never read."""
        self._guard: Guard | None = None
        self._variables: Context | None = copy_context()
        """The context variables of the code that made the call; callbacks have them as well."""
        call.on_done = self._complete

    @property
    def worker_name(self) -> str:
        """Name of the worker that was called."""
        return self._call.worker_name

    def _complete(self, call: PendingCall) -> None:
        """Completes the future; after an interrupt another thread calls this again."""
        if call.on_done is None:
            if not self.done():
                self._fail(failures.interrupted(call))
            return
        call.on_done = None  # Breaks a cycle: the garbage collector does not traverse futures.
        call.kept = None
        call.parent = None
        # Callbacks belong to the autograd context and the served call of the code that made this
        # call, also those of PyTorch's own futures, as of ``collect_all``.
        variables, self._variables = self._variables, None
        assert variables is not None
        try:
            result = variables.run(self._worker.result_of, call)
        except BaseException as error:
            variables.run(self._fail, error)
        else:
            variables.run(self.set_result, result)

    def _fail(self, error: BaseException) -> None:
        guard = None
        if not self.is_watched:
            guard = self._worker.unseen.guard(error, self._call)
        if guard is None:
            fail(self, error)
            return
        drop_frames(error)
        self._guard = guard
        if self.is_watched:  # just now, before there was a guard
            guard.was_seen = True
        self._set_unwrap_func(partial(_raise_seen, guard))
        self.set_result(error)  # type: ignore[arg-type]

    def _watch(self) -> None:
        """Notes that an error of the call needs no report."""
        self.is_watched = True
        guard = self._guard
        if guard is not None:
            guard.was_seen = True

    def wait(self) -> T:
        """Blocks until the call has ended, at most its timeout; returns its result.

        The waiting thread reads the answer itself where it can, which saves a thread switch.

        Raises:
            CallTimeout: There was no answer in time.
            WorkerLost: The callee was lost.
            Exception: The error of the remote function.
        """
        try:
            if not self.done():
                self._worker.agent.calls.wait(self._call, may_complete=not self.is_watched)
            value = cast("T", torch._C.Future.wait(self))
            return self._ordered(value) if device_streams.HAS_CUDA else value
        except Exception as error:
            shorten(error)
            raise

    def value(self) -> T:
        """Returns the result of a call that has ended.

        Raises:
            Exception: As ``wait``.
        """
        try:
            if device_streams.HAS_CUDA:
                return OrderedFuture.value(self)
            return cast("T", torch._C.Future.value(self))
        except Exception as error:
            shorten(error)
            raise

    def then(self, callback: Callable[[Future[T]], S]) -> torch.futures.Future[S]:
        """Calls ``callback`` with this future when it is done; returns a future of its result.

        The callback has the context variables and the grad mode of the code that adds it. So its
        calls belong to the autograd context that is open there.
        """
        self._watch()
        return OrderedFuture.then(self, callback)

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Calls ``callback`` with this future when it is done; it runs as that of ``then``."""
        self._watch()
        OrderedFuture.add_done_callback(self, callback)

    def cancel(self) -> bool:
        """Cancels the call: the future fails with ``CallCancelled``, and the callee is told.

        A function that has not started will not start. ``asyncio.CancelledError`` is raised in an
        ``async def``. Any other function runs on and may query
        ``torchweft.rpc.is_cancelled``; its calls end or are refused, and its result is discarded.

        Returns:
            Whether the call was still open.
        """
        call = self._call
        self._watch()
        error = CallCancelled("the call was cancelled by its caller", worker=call.worker_name)
        return self._worker.agent.calls.cancel(call, error)

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()

        def pass_on(done: torch.futures.Future[T]) -> None:
            try:
                result = torch.futures.Future.wait(done)
            except StopIteration as error:
                # asyncio futures refuse StopIteration; the caller would wait for ever.
                stopped = RuntimeError(f"the remote function raised {error!r}")
                stopped.__cause__ = error
                tell(waiter.set_exception, stopped)
            except BaseException as error:
                tell(waiter.set_exception, error)
            else:
                tell(waiter.set_result, result)

        def tell(setter: Callable[[Any], None], outcome: Any) -> None:
            try:
                loop.call_soon_threadsafe(_set, waiter, setter, outcome)
            except RuntimeError:  # The loop has been closed: nobody awaits the call any more.
                if not loop.is_closed():
                    raise

        self.add_done_callback(pass_on)
        waiter.add_done_callback(lambda ended: ended.cancelled() and self.cancel())
        return _in_order(self, waiter) if device_streams.HAS_CUDA else waiter.__await__()


def _in_order(future: OrderedFuture[T], waiter: asyncio.Future[T]) -> Generator[Any, None, T]:
    """Awaits the result, and has the streams of the loop's thread wait for it."""
    yield from waiter.__await__()
    return OrderedFuture.wait(future)


def open_calls(futures: Iterable[object]) -> list[PendingCall]:
    """Returns the open calls of those futures that stand for calls; see ``Reactor.waiting``."""
    found = [each for each in futures if isinstance(each, Future) and not each.done()]
    return [each._call for each in found]


def ignore_errors(future: Future[Any]) -> None:
    """Suppresses the error report of a best-effort call."""
    future._watch()


def _raise_seen(guard: Guard, held: Any) -> None:
    """Raises a copy of the error that a future holds, when the value of the future is read."""
    guard.was_seen = True
    raise_copy(held)


def _set(waiter: asyncio.Future[Any], setter: Callable[[Any], None], outcome: Any) -> None:
    if not waiter.done():
        setter(outcome)
