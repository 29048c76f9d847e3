"""Runs remotely called ``async def`` functions on one event loop of the worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import types
import weakref
from collections.abc import Callable, Coroutine, Generator, Sequence
from types import FrameType
from typing import Any, TypeVar

from torchweft.autograd.contexts import set_current_id
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Attached, Mark, ServedStreams, arguments_of
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.threads.thread_modes import THREADS, Modes, take_away, tidy
from torchweft.errors import CallRefused

T = TypeVar("T")

_log = logging.getLogger("torchweft")

OnDone = Callable[[Any, BaseException | None], None]
"""Takes the result or the error of a coroutine."""


class CoroutineRunner:
    """An event loop in a thread of its own, started when it is first needed.

    Args:
        name: Name of the thread.
        streams: The streams of the worker; the thread has one of its own on each GPU.
    """

    def __init__(self, name: str, streams: ServedStreams | None = None) -> None:
        self._name = name
        self._streams = Attached(ServedStreams() if streams is None else streams)
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        context_id: int,
        on_done: OnDone,
    ) -> Callable[[], None]:
        """Runs ``coroutine`` in an autograd context; ``on_done`` gets its result or its error.

        Returns:
            A function that cancels the coroutine, from any thread, without blocking.

        Raises:
            CallRefused: The worker is shutting down.
            RuntimeError: The system cannot start a thread now.
        """
        try:
            with self._lock:  # A coroutine scheduled before ``close`` is at least cancelled.
                loop = self._started()
                running = _Running(loop, coroutine, context_id, on_done, self._streams)
                loop.call_soon_threadsafe(running.start)
                return running.cancel
        except BaseException:
            coroutine.close()
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._is_closed:
            raise CallRefused("the worker is shutting down; it starts no coroutine")
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(
                target=self._serve, args=(loop,), name=self._name, daemon=True
            )
            try:
                thread.start()
            except BaseException:  # A later call may find room for a thread.
                loop.close()
                raise
            self._loop, self._thread = loop, thread
        return self._loop

    def frames(self) -> list[tuple[str, list[FrameType]]]:
        """Returns the names and frames of the coroutines that have not ended."""
        loop = self._loop
        if loop is None:
            return []
        return [
            (
                f"{self._name} {task.get_name()}",
                _frames_of(task.get_coro()) + _frames_of(_driven.get(task)),
            )
            for task in asyncio.all_tasks(loop)
        ]

    def close(self, limit_s: float) -> None:
        """Cancels all coroutines and ends the thread, unless a coroutine blocks it.

        Args:
            limit_s: Seconds to wait for the thread.
        """
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop, self._thread, self._is_closed = None, None, True
            if loop is None or thread is None:
                return
            loop.call_soon_threadsafe(loop.stop)
        thread.join(limit_s)
        if thread.is_alive():
            _log.warning("a coroutine blocks thread %r at shutdown", self._name)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs the loop until ``close``, then until the remaining tasks are cancelled.

        A task or callback that a function started may end the loop by ``SystemExit`` or
        ``KeyboardInterrupt``, or stop it. The loop remains usable, and goes on.
        """
        THREADS.follow()
        self._streams.renew()
        try:
            while True:
                _go_on(loop.run_forever)
                if self._is_closed:
                    break
            while not _go_on(lambda: loop.run_until_complete(_cancel_others())):
                pass
        finally:
            self._streams.close()
            loop.close()


def _go_on(run: Callable[[], object]) -> bool:
    """Runs a loop; returns False if an exception ended it."""
    try:
        run()
    except BaseException:
        log_exception(
            "a task or callback of an async function tried to end the worker's event loop"
        )
        return False
    return True


def _frames_of(awaiting: Any) -> list[FrameType]:
    """Returns the frames of a coroutine and of the awaitables below it, outermost first."""
    frames = []
    while awaiting is not None:
        frame = getattr(awaiting, "cr_frame", None) or getattr(awaiting, "gi_frame", None)
        if frame is None:
            break
        frames.append(frame)
        awaiting = getattr(awaiting, "cr_await", None) or getattr(awaiting, "gi_yieldfrom", None)
    return frames


_driven: weakref.WeakKeyDictionary[asyncio.Task[None], Coroutine[Any, Any, Any]] = (
    weakref.WeakKeyDictionary()
)
"""The coroutine of each task of ``_Running``, which ``_in_context`` drives step by step."""


@types.coroutine
def _in_context(coroutine: Coroutine[Any, Any, T], context_id: int) -> Generator[Any, Any, T]:
    """Awaits a coroutine in an autograd context, which its task keeps from then on.

    PyTorch's modes belong to the thread, on which other coroutines run in between. So this
    coroutine's modes are taken off the thread while it is suspended.
    """
    set_current_id(context_id)
    step: Callable[[Any], Any] = coroutine.send
    argument: Any = None
    modes: Modes | None = None
    while True:
        others = take_away()  # Modes left by tasks that coroutines have started.
        if modes is not None:
            modes.put_back()
        try:
            awaited = step(argument)
            modes = take_away()
        except BaseException as error:
            tidy()
            if isinstance(error, StopIteration):
                result: T = error.value
                return result
            raise
        finally:
            if others is not None:
                others.put_back()
        try:
            argument, step = (yield awaited), coroutine.send
        except BaseException as error:
            argument, step = error, coroutine.throw


class _Running:
    """A coroutine on the loop; reports its outcome once, even if it never starts."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any],
        context_id: int,
        on_done: OnDone,
        streams: Attached,
    ) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self._context_id = context_id
        self._on_done: OnDone | None = on_done
        self._task: asyncio.Task[None] | None = None
        self._streams = streams
        self._given: Sequence[Any] = ()
        self._mark: Mark | None = None
        if device_streams.HAS_CUDA:
            self._mark = device_streams.mark()
            if self._mark is not None:
                self._given = device_streams.tensors_on_devices(arguments_of(coroutine))

    def start(self) -> None:
        if device_streams.HAS_CUDA:
            self._streams.renew()
            device_streams.use(self._mark, self._given)
            self._given = ()
        self._task = self._loop.create_task(self._run())
        _driven[self._task] = self._coroutine
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed, and has cancelled the task.
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        assert self._task is not None, "it was started before, on the same loop"
        self._task.cancel()

    async def _run(self) -> None:
        try:
            result = await _in_context(self._coroutine, self._context_id)
        except BaseException as error:
            self._report(None, error)
            if isinstance(error, asyncio.CancelledError):
                raise
        else:
            self._report(result, None)

    def _ended(self, _: object) -> None:
        """Reports a task that was cancelled before its first step."""
        self._coroutine.close()
        self._report(None, asyncio.CancelledError())

    def _report(self, result: Any, error: BaseException | None) -> None:
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            if device_streams.HAS_CUDA:
                self._streams.publish()
            on_done(result, error)


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
