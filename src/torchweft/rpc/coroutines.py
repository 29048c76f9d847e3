"""Runs remotely called ``async def`` functions on one event loop of a worker, and looks after it.

Plain functions of the same objects run on other threads. They may wake what waits on the loop: an
``asyncio.Event`` that a plain method sets. asyncio itself would have the waiting coroutine run
"soon", but a loop that sleeps does not notice. So this loop takes callbacks from any thread.

A coroutine that blocks its thread stops all others. ``LoopWatch`` names it in the log. If what it
blocks for is a coroutine of this same worker, neither would ever go on. That call is refused, and
the error says where to write ``await``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import sys
import threading
import types
import weakref
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from time import monotonic
from types import FrameType
from typing import Any, TypeVar

from torchweft.autograd.contexts import set_current_id
from torchweft.engine.protocol.calls import ServedCall
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Attached, Mark, ServedStreams, arguments_of
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.threads.thread_modes import THREADS, Modes, take_away, tidy
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.calls import PendingCall
from torchweft.errors import CallRefused

_log = logging.getLogger("torchweft")

T = TypeVar("T")

OnDone = Callable[[Any, BaseException | None], None]
"""Takes the result or the error of a coroutine."""


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that callbacks from other threads wake.

    The thread that adds one goes on first: an ``asyncio.Event`` is in the middle of its work then,
    and must not meet the coroutines that it wakes. So that thread makes no system call here, which
    would let others run, but has a third thread wake the loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = 0
        """The thread that runs it; 0 as long as it does not run."""
        self.is_to_wake: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def call_soon(  # type: ignore[override]  # passes all on
        self, *args: Any, **kwargs: Any
    ) -> asyncio.Handle:
        """Runs a callback soon, on the thread of the loop."""
        handle = super().call_soon(*args, **kwargs)
        if get_ident() != self.thread:
            self.is_to_wake.put(True)
        return handle

    def wake_when_asked(self) -> None:
        """Wakes the loop when another thread has added a callback, until False is put."""
        while self.is_to_wake.get():
            with contextlib.suppress(RuntimeError):  # It is closed.
                self.call_soon_threadsafe(bool)


_SOON_S = 0.01


class CoroutineRunner:
    """An event loop in a thread of its own, started when it is first needed.

    Args:
        name: Name of the thread.
        streams: The streams of the worker; the thread has one of its own on each GPU.
    """

    def __init__(self, name: str, streams: ServedStreams | None = None) -> None:
        self._name = name
        self.streams = Attached(ServedStreams() if streams is None else streams)
        """The streams of the thread, by which GPU work of other threads is ordered."""
        self._lock = threading.RLock()
        self.loop: _Loop | None = None
        self._thread: threading.Thread | None = None
        self._waker: threading.Thread | None = None
        self._is_closed = False
        self.on_run: Callable[[Running], None] = lambda running: None
        """Called with each coroutine that is to be run."""

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
                running = Running(loop, coroutine, context_id, on_done, self.streams)
                loop.call_soon_threadsafe(running.start)
            self.on_run(running)
            return running.cancel
        except BaseException:
            coroutine.close()
            raise

    def _started(self) -> _Loop:
        if self._is_closed:
            raise CallRefused("the worker is shutting down; it starts no coroutine")
        if self.loop is None:
            loop = _Loop()
            thread = threading.Thread(
                target=self._serve, args=(loop,), name=self._name, daemon=True
            )
            try:
                thread.start()
            except BaseException:  # A later call may find room for a thread.
                loop.close()
                raise
            self.loop, self._thread = loop, thread
            loop.call_soon_threadsafe(loop.call_later, _SOON_S, self._start_waker, loop)
        return self.loop

    def _start_waker(self, loop: _Loop) -> None:
        """Starts the thread that wakes the loop, a moment after the first coroutines."""
        name = f"{self._name}-waker"
        waker = threading.Thread(target=loop.wake_when_asked, name=name, daemon=True)
        try:
            waker.start()
        except RuntimeError:  # Later there may be room for a thread.
            loop.call_later(1.0, self._start_waker, loop)
        else:
            self._waker = waker

    def frames(self) -> list[tuple[str, list[FrameType]]]:
        """Returns the names and frames of the coroutines that have not ended."""
        loop = self.loop
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
            loop, thread = self.loop, self._thread
            self.loop, self._thread, self._is_closed = None, None, True
            if loop is None or thread is None:
                return
            loop.call_soon_threadsafe(loop.stop)
        thread.join(limit_s)
        loop.is_to_wake.put(False)
        if self._waker is not None:
            self._waker.join(limit_s)
        if thread.is_alive():
            _log.warning("a coroutine blocks thread %r at shutdown", self._name)

    def _serve(self, loop: _Loop) -> None:
        """Runs the loop until ``close``, then until the remaining tasks are cancelled.

        A task or callback that a function started may end the loop by ``SystemExit`` or
        ``KeyboardInterrupt``, or stop it. The loop remains usable, and goes on.
        """
        THREADS.follow()
        self.streams.renew()
        loop.thread = get_ident()
        try:
            while True:
                _go_on(loop.run_forever)
                if self._is_closed:
                    break
            while not _go_on(lambda: loop.run_until_complete(_cancel_others())):
                pass
        finally:
            self.streams.close()
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
"""The coroutine of each task of ``Running``, which ``_in_context`` drives step by step."""


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


class Running:
    """A coroutine on the loop; reports its outcome once, even if it never starts."""

    def __init__(
        self,
        loop: _Loop,
        coroutine: Coroutine[Any, Any, Any],
        context_id: int,
        on_done: OnDone,
        streams: Attached,
    ) -> None:
        self._loop = loop
        self.coroutine = coroutine
        self._context_id = context_id
        self.on_done: OnDone | None = on_done
        self._begins = allocate_lock()
        self._task: asyncio.Task[None] | None = None
        self._streams = streams
        self._given: Sequence[Any] = ()
        self._mark: Mark | None = None
        if device_streams.HAS_CUDA:
            self._mark = device_streams.mark()
            if self._mark is not None:
                self._given = device_streams.tensors_on_devices(arguments_of(coroutine))

    @property
    def has_begun(self) -> bool:
        """Whether it was started, or refused."""
        return self._begins.locked()

    def refuse(self, error: BaseException) -> None:
        """Reports an error in place of an outcome, if the coroutine has not begun."""
        if self._begins.acquire(blocking=False):
            self._report(None, error)

    def start(self) -> None:
        """Starts the coroutine on its loop, unless it was refused."""
        if not self._begins.acquire(blocking=False):
            self.coroutine.close()
            return
        if device_streams.HAS_CUDA:
            self._streams.renew()
            device_streams.use(self._mark, self._given)
            self._given = ()
        self._task = self._loop.create_task(self._run())
        _driven[self._task] = self.coroutine
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Cancels the coroutine, from any thread, without blocking."""
        with contextlib.suppress(RuntimeError):  # The loop is closed, and has cancelled the task.
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:  # Else it was refused.
            self._task.cancel()

    async def _run(self) -> None:
        try:
            result = await _in_context(self.coroutine, self._context_id)
        except BaseException as error:
            self._report(None, error)
            if isinstance(error, asyncio.CancelledError):
                raise
        else:
            self._report(result, None)

    def _ended(self, _: object) -> None:
        """Reports a task that was cancelled before its first step."""
        self.coroutine.close()
        self._report(None, asyncio.CancelledError())

    def _report(self, result: Any, error: BaseException | None) -> None:
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            if device_streams.HAS_CUDA:
                self._streams.publish()
            on_done(result, error)


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


STANDS_S = 1.0
"""After so many seconds a loop that does not go on is named in the log."""
_LOOK_S = 0.1
_WEFT = os.path.dirname(os.path.dirname(__file__)) + os.sep


class LoopWatch:
    """Notices a loop that stands still, and coroutines that a loop waits for and cannot begin.

    Args:
        runner: The runner of the loop.
        agent: Its worker; calls ``tick`` once a second at least.
    """

    def __init__(self, runner: CoroutineRunner, agent: Agent) -> None:
        self._runner = runner
        self._agent = agent
        self._of_itself: deque[Running] = deque()
        """Coroutines that this worker has called on itself, and that had not begun."""
        self._asked_s: float | None = None
        """Since when the loop has been asked to go on."""
        self._is_told = False
        runner.on_run = self._note
        self._timer = agent.timers.add(self.tick)

    def _note(self, running: Running) -> None:
        call = running.on_done
        if isinstance(call, ServedCall) and call.peer.is_self:
            self._of_itself.append(running)
            self._timer.wake_by(monotonic() + _LOOK_S)

    def tick(self, now_s: float) -> float:
        """Looks at the loop; a job of the timers."""
        loop = self._runner.loop
        if loop is None:
            return math.inf
        self._look_for_standstill(loop, now_s)
        for _ in range(len(self._of_itself)):
            running = self._of_itself.popleft()
            if not running.has_begun:
                self._of_itself.append(running)
                if self._waits_for(loop, running.on_done):
                    self._refuse(loop, running)
        return now_s + _LOOK_S if self._of_itself else math.inf

    def _look_for_standstill(self, loop: _Loop, now_s: float) -> None:
        if self._asked_s is None:
            if asyncio.current_task(loop) is not None:
                self._asked_s = now_s
                with contextlib.suppress(RuntimeError):  # It is closed just now.
                    loop.call_soon_threadsafe(self._goes_on)
        elif not self._is_told and now_s - self._asked_s >= STANDS_S:
            self._is_told = True
            _log.warning(
                "%s has blocked the event loop of worker %r for %.0f s, %s; the other async "
                "functions of this worker wait meanwhile. Await there, or write it without async: "
                "plain functions run on other threads",
                _name_of_current(loop),
                self._agent.info.name,
                now_s - self._asked_s,
                _place(loop.thread),
            )

    def _goes_on(self) -> None:
        self._asked_s, self._is_told = None, False

    def _waits_for(self, loop: _Loop, call: Any) -> bool:
        """Whether the thread of the loop blocks until a call has ended that this worker serves."""
        note = self._agent.reactor.notes.get(loop.thread)
        waiting = None if note is None else note()
        parts = [] if waiting is None else waiting.parts()
        if waiting is None or (waiting.needs_any and len(parts) > 1):
            return False
        waited = [each for each in parts if isinstance(each, PendingCall)]
        by_number = {each.number: each for each in self._agent.calls.all()}
        while call is not None and call.peer.is_self:
            if any(each.number == call.number for each in waited):
                return True
            made = by_number.get(call.number)  # The same call, as its caller knows it.
            call = None if made is None else made.parent
        return False

    def _refuse(self, loop: _Loop, running: Running) -> None:
        name = _name_of(running.coroutine)
        error = CallRefused(
            f"{name} would never run: {_name_of_current(loop)} blocks the event loop of worker "
            f"{self._agent.info.name!r}, on which both run, until it has ended; write "
            "'await' there, as in 'await rpc.rpc_async(...)'",
            worker=self._agent.info.name,
            call=name,
        )
        self._agent.reactor.submit(Running.refuse, running, error)


def _name_of_current(loop: _Loop) -> str:
    """Returns the name of the coroutine that a loop runs now."""
    task = asyncio.current_task(loop)
    if task is None:
        return "a callback"
    return _name_of(_driven.get(task, task.get_coro()))


def _name_of(coroutine: object) -> str:
    return str(getattr(coroutine, "__qualname__", coroutine))


def _place(thread: int) -> str:
    """Returns where a thread is, in the code of the program."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(_WEFT):
        frame = frame.f_back
    return "" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno}"
