"""``async def`` functions that are called remotely run on one event loop of the worker."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from weft.autograd.contexts import enter
from weft.errors import CallRefused

_log = logging.getLogger("weft")

_CLOSE_TIMEOUT_S = 5.0


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
        on_done: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Runs ``coroutine`` in an autograd context; ``on_done`` gets its result or its error."""
        loop = self._started()
        if loop is None:
            coroutine.close()
            on_done(None, CallRefused("the worker is shutting down; it starts no coroutine"))
            return
        asyncio.run_coroutine_threadsafe(_report(_InContext(coroutine, context_id), on_done), loop)

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

    def close(self) -> None:
        """Cancels what still runs, and ends the thread; not one whose coroutine blocks it."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop, self._thread, self._is_closed = None, None, True
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_TIMEOUT_S)
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


async def _report(
    awaitable: _InContext, on_done: Callable[[Any, BaseException | None], None]
) -> None:
    try:
        result = await awaitable
    except BaseException as error:
        on_done(None, error)
        if isinstance(error, asyncio.CancelledError):
            raise
    else:
        on_done(result, None)


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
