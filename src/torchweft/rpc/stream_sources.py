"""Streams on the side of the generator: values are computed when they have been asked for.

A consumer asks for each value by a call of its own, with the number of the value, some calls ahead.
So the calls that are open are the consumer's credit; a cancelled call, or a lost consumer, ends the
stream; and values, errors and gradients travel as those of any call.

A generator may keep modes of PyTorch, and locks, from one value to the next. So each has a thread
of its own, which waits without a message to anyone until the next value is asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import CoroutineType
from typing import Any

from torch import Tensor

from torchweft.arguments import kind_of
from torchweft.autograd.contexts import set_current_id
from torchweft.errors import ArgumentTypeError, CallCancelled, CallRefused, ConfigurationError
from torchweft.rpc.current_call import TAKEN, check_called, check_types
from torchweft.rpc.handles import Handle
from torchweft.rpc.serving import method_of
from torchweft.serialize.functions import describe
from torchweft.serialize.registry import remotely_callable
from torchweft.threads import device_streams
from torchweft.threads.device_streams import arguments_of
from torchweft.threads.reports import log_exception
from torchweft.threads.served_streams import Attached, ServedStreams
from torchweft.threads.thread_modes import (
    has_dispatch_modes,
    has_function_modes,
    plain_operations,
)
from torchweft.wire.messages import NO_GRAD
from torchweft.worker.agent import Agent, Slot
from torchweft.worker.calls import current_call
from torchweft.worker.peers import Peer

_log = logging.getLogger("torchweft")

MOST_AHEAD = 4096
"""How many values a consumer may ask for at a time."""

END: tuple[Any, ...] = ()
"""The answer after the last value; a value is in a tuple of its own."""


class Source:
    """One generator. Thread-safe.

    Args:
        name: Name of its thread.
        iterator: Yields the values.
        streams: The streams of the worker; the thread has one of its own on each GPU.
        function: Name of the function that has made the iterator, for reports.
    """

    def __init__(
        self,
        name: str,
        iterator: Iterator[Any],
        streams: ServedStreams | None = None,
        function: str = "",
    ) -> None:
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
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

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
                self._changed.notify()
                call.on_cancel(lambda _: self.stop())
                return
        call(END, None)

    def stop(self) -> None:
        """Ends the stream: the generator is closed where it waits. Never blocks for long."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def start(self) -> None:
        """Starts the thread."""
        self.thread.start()

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
        with self._changed:
            call = self._asked.pop(self._next)
            self._next += 1
        if self._answer(call):
            return True
        self._close()
        return False

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
            if has_dispatch_modes() or has_function_modes():  # of a block around the ``yield``
                with plain_operations():
                    call((value,), None)
            else:
                call((value,), None)
            return True
        finally:
            current_call.reset(before)
            self._streams.publish()
        return False

    def _close(self) -> None:
        with self._changed:
            self._has_ended = True
            left, self._asked = list(self._asked.values()), {}
        close: Callable[[], object] | None = getattr(self._iterator, "close", None)
        del self._iterator  # Its objects end with the stream.
        try:
            if close is not None:
                close()
        except BaseException:
            log_exception("a generator failed when its stream was closed")
        for call in left:
            if self._is_stopped:
                call(None, CallCancelled("the stream was closed"))
            else:
                call(END, None)


_MOST_GIVEN_UP = 1000
"""How many streams may be ended before they are begun."""


class Sources:
    """The streams that one worker makes for others. Thread-safe.

    Args:
        agent: The worker's agent.
        start: Has a source answer its calls, by default in its own thread.
    """

    def __init__(self, agent: Agent, start: Callable[[Source], None] = Source.start) -> None:
        self._agent = agent
        self._start = start
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
        try:
            iterator = iter(values)
        except TypeError:
            fix = "a stream is of a generator or anything else that for loops take"
            if isinstance(values, CoroutineType):
                values.close()  # Otherwise Python warns that it was never awaited.
            if isinstance(values, (Awaitable, AsyncIterable)):
                fix += (
                    "; write it without async: each stream has a thread of its own, which may wait"
                )
            raise ArgumentTypeError(
                f"{name} returned {kind_of(values)}, which cannot be iterated over; {fix}"
            ) from None
        source = Source(
            f"weft-{self._agent.info.name}-stream-{peer.name}-{number}",
            iterator,
            self._agent.served_streams,
            name,
        )
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
        for key in [key for key, each in self._sources.items() if not each.thread.is_alive()]:
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
            if source.thread is not threading.current_thread():
                source.thread.join(max(end_s - time.monotonic(), 0.0))
        stuck = [each.thread.name for each in sources if each.thread.is_alive()]
        if stuck:
            _log.warning("generators still running user code at shutdown: %s", ", ".join(stuck))


SOURCES: Slot[Sources] = Slot()


# Called by other workers.


@remotely_callable
def begin(number: int, function: Any, args: Any, kwargs: Any, of: Any = None) -> None:
    """Calls a function that returns an iterator, or a method of a value, and begins its stream."""
    check_types(number=(number, int), args=(args, (tuple, list)), kwargs=(kwargs, dict))
    call: Any = current_call.get()
    if of is None:
        check_called(function)
    else:
        check_types(of=(of, Handle), function=(function, str))
        function = method_of(of.local_value(), function)
    values = function(*args, **kwargs)
    call.worker.agent.slots[SOURCES].begin(call.peer, number, values, describe(function))


@remotely_callable
def pull(number: int, place: int) -> Any:
    """Answers with a value of a stream, in a tuple, or with ``END``, when it is there."""
    check_types(number=(number, int), place=(place, int))
    call: Any = current_call.get()
    source = call.worker.agent.slots[SOURCES].find(call.peer, number)
    if source is None:
        return END
    source.pull(place, call)
    return TAKEN


@remotely_callable
def end(number: int) -> None:
    """Ends a stream."""
    check_types(number=(number, int))
    call: Any = current_call.get()
    call.worker.agent.slots[SOURCES].end(call.peer, number)
