"""``async def`` functions that are called remotely run on one event loop of the worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from weft.autograd.contexts import enter
from weft.errors import CallRefused

_log = logging.getLogger("weft")

OnDone = Callable[[Any, BaseException | None], None]
"""Takes the result or the error of a coroutine."""


class CoroutineRunner:
    """An event loop in a thread of its own, started when it is first needed.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        context_id: int,
        on_done: OnDone,
    ) -> Callable[[], None] | None:
        """Runs ``coroutine`` in an autograd context; ``on_done`` gets its result or its error.

        Returns:
            What cancels it, from any thread, without blocking. None where the worker shuts down
            and the coroutine was not begun.
        """
        loop = self._started()
        if loop is None:
            coroutine.close()
            on_done(None, CallRefused("the worker is shutting down; it starts no coroutine"))
            return None
        running = _Running(loop, coroutine, context_id, on_done)
        loop.call_soon_threadsafe(running.start)
        return running.cancel

    def _started(self) -> asyncio.AbstractEventLoop | None:
        with self._lock:
            if self._is_closed:
                return None
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
            return self._loop

    def close(self, limit_s: float) -> None:
        """Cancels what still runs, and ends the thread; not one whose coroutine blocks it.

        Args:
            limit_s: How long to wait for it.
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


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Runs what comes until the loop is stopped, and what is left then until it is cancelled."""
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel_others())
    finally:
        loop.close()


class _InContext:
    """Awaits a coroutine; each of its steps, on whatever occasion, records into one context.

    The current context belongs to the thread, and other coroutines run on it in between.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context_id: int) -> None:
        self._coroutine = coroutine
        self._context_id = context_id

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[Any], Any] = self._coroutine.send
        argument: Any = None
        while True:
            try:
                with enter(self._context_id):
                    awaited = step(argument)
            except StopIteration as stop:
                return stop.value
            try:
                argument, step = (yield awaited), self._coroutine.send
            except BaseException as error:
                argument, step = error, self._coroutine.throw


class _Running:
    """A coroutine on the loop; its outcome is reported once, also where it is never begun."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any],
        context_id: int,
        on_done: OnDone,
    ) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self._context_id = context_id
        self._on_done: OnDone | None = on_done
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed, and has cancelled it.
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        assert self._task is not None, "it was started before, on the same loop"
        self._task.cancel()

    async def _run(self) -> None:
        try:
            result = await _InContext(self._coroutine, self._context_id)
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
            on_done(result, error)


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
