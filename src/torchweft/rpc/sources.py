"""The worker's side of streams: runs generators, and answers the calls for their values.

A generator may keep modes of PyTorch, and locks, from one value to the next. So each has a thread
of its own, which waits without a message to any worker until the next value is asked for. An
asynchronous generator has a coroutine of its own on the event loop of the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from types import CoroutineType
from typing import Any

from torch import Tensor

from torchweft.arguments import kind_of
from torchweft.autograd.contexts import set_current_id
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Attached, ServedStreams, arguments_of
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.threads.thread_modes import (
    has_dispatch_modes,
    has_function_modes,
    plain_operations,
)
from torchweft.engine.wire.messages import NO_GRAD
from torchweft.engine.worker.agent import Agent, Slot
from torchweft.engine.worker.calls import current_call
from torchweft.engine.worker.peers import Peer
from torchweft.errors import ArgumentTypeError, CallCancelled, CallRefused, ConfigurationError
from torchweft.rpc.coroutines import CoroutineRunner
from torchweft.rpc.worker import WORKER

_log = logging.getLogger("torchweft")

MOST_AHEAD = 4096
"""How many values a consumer may ask for at a time."""

END: tuple[Any, ...] = ()
"""The answer after the last value; a value is in a tuple of its own."""


class Source:
    """One generator, in a thread of its own. Thread-safe.

    Args:
        name: Name of the thread.
        iterator: Yields the values.
        streams: The streams of the worker; the thread has one of its own on each GPU.
        function: Name of the function that has made the iterator, for reports.
    """

    def __init__(
        self,
        name: str,
        iterator: Any,
        streams: ServedStreams | None = None,
        function: str = "",
    ) -> None:
        self.name = name
        self._function = function.encode()
        self._iterator = iterator
        self._streams = Attached(ServedStreams() if streams is None else streams)
        self._mark = device_streams.mark() if device_streams.HAS_CUDA else None
        self._given: Sequence[Any] = ()
        if self._mark is not None:
            self._given = device_streams.tensors_on_devices(arguments_of(iterator))
        self._asked: dict[int, Any] = {}
        self._next = 0
        self._is_stopped = False
        self._has_ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins to answer calls.

        Raises:
            RuntimeError: The system cannot start a thread now.
        """
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it answers no calls any more, and the generator was closed."""
        return not self._thread.is_alive()

    def join(self, limit_s: float) -> None:
        """Waits until it is over, for a limited time; not in the generator itself."""
        if self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def pull(self, place: int, call: Any) -> None:
        """Answers a call with the value at a place, as soon as it is computed.

        Raises:
            ConfigurationError: The place is before the next value, or too far ahead.
        """
        call.function = self._function
        with self._changed:
            if not self._has_ended:
                if not self._next <= place < self._next + MOST_AHEAD or place in self._asked:
                    raise ConfigurationError(
                        f"value {place} of a stream was asked for, where {self._next} is the next; "
                        f"at most {MOST_AHEAD} may be asked for ahead"
                    )
                self._asked[place] = call
                self._notify()
                call.on_cancel(lambda _: self.stop())
                return
        call(END, None)

    def stop(self) -> None:
        """Ends the stream: the generator is closed where it waits. Never blocks for long."""
        with self._changed:
            self._is_stopped = True
            self._notify()

    def _notify(self) -> None:
        """Has the calls and the end of the stream looked at; called in the lock."""
        self._changed.notify()

    def _run(self) -> None:
        try:
            while self._await_pull():
                if not self.answer_next():
                    return
            self._close()
        finally:
            self._streams.close()

    def _await_pull(self) -> bool:
        """Waits for the call for the next value; returns False if the stream was stopped."""
        with self._changed:
            while not (self.is_asked or self._is_stopped):
                self._changed.wait()
            return not self._is_stopped

    @property
    def is_asked(self) -> bool:
        """Whether a call waits for the next value."""
        return self._next in self._asked

    def answer_next(self) -> bool:
        """Computes the next value, for the call that waits for it; returns whether there was one.

        After the last value, and after an error, the stream has ended.
        """
        if self._answer(self._take()):
            return True
        self._close()
        return False

    def _take(self) -> Any:
        """Takes the call for the next value."""
        with self._changed:
            call = self._asked.pop(self._next)
            self._next += 1
        return call

    def _answer(self, call: Any) -> bool:
        before = current_call.set(call)
        set_current_id(0 if call.context_id == NO_GRAD else call.context_id)
        self._streams.renew()
        device_streams.use(self._mark, self._given)
        self._mark, self._given = None, ()
        try:
            carrier = call.worker.carrier
            if carrier is None:
                value = next(self._iterator)
            else:
                value = carrier.around(call, partial(next, self._iterator))
        except StopIteration:
            call(END, None)
        except BaseException as error:
            call(None, error)
        else:
            # There may be modes of a block around the ``yield``.
            has_modes = has_dispatch_modes() or has_function_modes()
            with plain_operations() if has_modes else contextlib.nullcontext():
                call((value,), None)
            return True
        finally:
            current_call.reset(before)
            self._streams.publish()
        return False

    def _close(self) -> None:
        left = self._end()
        close: Callable[[], object] | None = getattr(self._iterator, "close", None)
        del self._iterator  # Its objects end with the stream.
        try:
            if close is not None:
                close()
        except BaseException:
            log_exception("a generator failed when its stream was closed")
        self._answer_rest(left)

    def _end(self) -> list[Any]:
        """Takes no further calls; returns those that wait."""
        with self._changed:
            self._has_ended = True
            left, self._asked = list(self._asked.values()), {}
        return left

    def _answer_rest(self, left: Iterable[Any]) -> None:
        for call in left:
            if self._is_stopped:
                call(None, CallCancelled("the stream was closed"))
            else:
                call(END, None)


class AsyncSource(Source):
    """One asynchronous generator, in a coroutine of its own. Thread-safe.

    One coroutine drives it from its begin to its end, so that modes of PyTorch, context variables
    and tasks of the generator last from one value to the next.

    Args:
        name: Name of the stream.
        iterator: Yields the values.
        coroutines: Runs it.
        function: Name of the function that has made the iterator, for reports.
    """

    def __init__(
        self, name: str, iterator: AsyncIterator[Any], coroutines: CoroutineRunner, function: str
    ) -> None:
        super().__init__(name, iterator, function=function)
        self._streams = coroutines.streams
        self._coroutines = coroutines
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._news = asyncio.Event()
        self._is_computing = False
        self._over = threading.Event()

    def start(self) -> None:
        """Begins to answer calls."""
        self._coroutines.run(self._serve(), 0, self._note_over)

    @property
    def is_over(self) -> bool:
        """Whether it answers no calls any more, and the generator was closed."""
        return self._over.is_set()

    def join(self, limit_s: float) -> None:
        """Waits until it is over, for a limited time; not on the event loop."""
        self._over.wait(limit_s)

    def _notify(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # It is closed, and has ended the coroutine.
                self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        """Wakes the coroutine, or cancels what it waits for if the stream was stopped."""
        self._news.set()
        if self._is_stopped and self._is_computing and self._task is not None:
            self._is_computing = False  # Once: the generator may clean up then.
            self._task.cancel()

    async def _serve(self) -> None:
        self._task = asyncio.current_task()
        with self._changed:
            self._loop = asyncio.get_running_loop()
        try:
            while not self._is_stopped:
                self._news.clear()
                if not self.is_asked:
                    await self._news.wait()
                elif not await self._answer_next():
                    break
        finally:
            left = self._end()
            close = getattr(self._iterator, "aclose", None)
            try:
                if close is not None:
                    await close()
            except BaseException:
                log_exception("a generator failed when its stream was closed")
            self._answer_rest(left)

    async def _answer_next(self) -> bool:
        call = self._take()
        self._is_computing = True
        try:
            carrier = call.worker.carrier
            if carrier is not None:
                for variable, value in carrier.around(call, copy_context).items():
                    variable.set(value)
            current_call.set(call)
            set_current_id(0 if call.context_id == NO_GRAD else call.context_id)
            self._streams.renew()
            device_streams.use(self._mark, self._given)
            self._mark, self._given = None, ()
            found = await anext(self._iterator)
        except StopAsyncIteration:
            call(END, None)
        except BaseException as error:
            call(None, error)
        else:
            self._streams.publish()
            call((found,), None)
            return True
        finally:
            self._is_computing = False
            current_call.set(None)
        return False

    def _note_over(self, _: object, error: BaseException | None) -> None:
        self._answer_rest(self._end())  # It may have been cancelled before its first step.
        self._over.set()


_MOST_GIVEN_UP = 1000
"""How many streams may be ended before they are begun."""


class Sources:
    """The streams that one worker makes for others. Thread-safe.

    Args:
        agent: The worker's agent.
        start: Has a source answer its calls, by default ``Source.start``.
    """

    def __init__(self, agent: Agent, start: Callable[[Source], None] | None = None) -> None:
        self._agent = agent
        self._start = start or (lambda source: source.start())
        self._sources: dict[tuple[int, int], Source] = {}
        self._given_up: deque[tuple[int, int]] = deque(maxlen=_MOST_GIVEN_UP)
        self._lock = threading.RLock()
        self._is_closed = False

    def begin(self, peer: Peer, number: int, values: Any, name: str) -> None:
        """Begins a stream for a worker, under a number of its own.

        Raises:
            ArgumentTypeError: There is nothing to iterate over.
            ConfigurationError: The worker has a stream of that number.
            CallRefused: This worker is leaving.
            CallCancelled: The consumer has closed the stream already.
            RuntimeError: The system cannot start a thread now.
        """
        if isinstance(values, Tensor):
            raise ArgumentTypeError(
                f"{name} returned a tensor, which would be taken apart row by row; yield its parts"
            )
        label = f"weft-{self._agent.info.name}-stream-{peer.name}-{number}"
        source: Source
        if isinstance(values, AsyncIterable):
            coroutines = self._agent.slots[WORKER].coroutines
            source = AsyncSource(label, aiter(values), coroutines, name)
        else:
            source = Source(label, _iterator_of(values, name), self._agent.served_streams, name)
        with self._lock:
            if self._is_closed or peer.lost is not None:
                raise CallRefused("the worker is shutting down; it begins no stream")
            if (peer.id, number) in self._given_up:
                raise CallCancelled("the stream was closed before it was begun")
            if (peer.id, number) in self._sources:
                raise ConfigurationError(f"worker {peer.name!r} has a stream {number} already")
            self._forget_ended()
            self._start(source)
            self._sources[peer.id, number] = source

    def _forget_ended(self) -> None:
        for key in [key for key, each in self._sources.items() if each.is_over]:
            del self._sources[key]

    def open(self) -> list[Source]:
        """Returns the streams that have not been ended."""
        with self._lock:
            return list(self._sources.values())

    def find(self, peer: Peer, number: int) -> Source | None:
        """Returns a stream of a worker; None if it has ended."""
        return self._sources.get((peer.id, number))

    def end(self, peer: Peer, number: int) -> None:
        """Ends a stream of a worker, also one that is still to be begun."""
        with self._lock:
            source = self._sources.pop((peer.id, number), None)
            if source is None:
                self._given_up.append((peer.id, number))
        if source is not None:
            source.stop()

    def peer_lost(self, peer: Peer) -> None:
        """Ends all streams of a lost worker."""
        with self._lock:
            numbers = [number for owner, number in self._sources if owner == peer.id]
        for number in numbers:
            self.end(peer, number)

    def close(self, limit_s: float) -> None:
        """Ends all streams; waits for their threads, but not for code of the program.

        Args:
            limit_s: Seconds to wait at most.
        """
        with self._lock:
            self._is_closed = True
        sources = self.open()
        for source in sources:
            source.stop()
        end_s = time.monotonic() + limit_s
        for source in sources:
            source.join(max(end_s - time.monotonic(), 0.0))
        stuck = [each.name for each in sources if not each.is_over]
        if stuck:
            _log.warning("generators still running user code at shutdown: %s", ", ".join(stuck))


def _iterator_of(values: Any, name: str) -> Iterator[Any]:
    try:
        return iter(values)
    except TypeError:
        if isinstance(values, CoroutineType):
            values.close()  # Otherwise Python warns that it was never awaited.
        raise ArgumentTypeError(
            f"{name} returned {kind_of(values)}, which cannot be iterated over; a stream is of a "
            "generator, also an asynchronous one, or of anything else that for loops take"
        ) from None


SOURCES: Slot[Sources] = Slot()
