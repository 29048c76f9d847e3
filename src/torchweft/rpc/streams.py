"""Streams of values that a generator of another worker yields.

A consumer asks for each value by a call of its own, with the number of the value, some calls ahead.
So the calls that are open are the consumer's credit; a cancelled call, or a lost consumer, ends the
stream; and values, errors and gradients travel as those of any call.

``torchweft.rpc.sources`` runs the generators.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torchweft.arguments import UNSET_RPC_TIMEOUT, check_type, limit_of, wrong_type
from torchweft.autograd.contexts import current_id, enter
from torchweft.closing import Closing
from torchweft.engine.codec.functions import describe
from torchweft.engine.codec.registry import remotely_callable
from torchweft.engine.codec.tracebacks import without_own_frames
from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.engine.worker.calls import PendingCall, current_call
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.references import Handle
from torchweft.errors import (
    CallCancelled,
    CallTimeout,
    ConfigurationError,
    NotInitialized,
    WorkerLost,
)
from torchweft.free_threading import shared_count
from torchweft.rpc.api import RRef, method_name
from torchweft.rpc.calls import (
    Destination,
    Future,
    call_and_wait,
    checked_call,
    ignore_errors,
    next_done,
    open_calls,
    start,
)
from torchweft.rpc.proxies import check_method
from torchweft.rpc.serving import (
    TAKEN,
    check_called,
    check_types,
    detached,
    method_of,
    remaining_time,
)
from torchweft.rpc.sources import END, MOST_AHEAD, SOURCES
from torchweft.rpc.waiting import Arrivals, as_completed, until_done
from torchweft.rpc.worker import WORKER, Worker

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

_log = logging.getLogger("torchweft")

_BEGIN = b"torchweft.rpc.streams:begin"
_PULL = b"torchweft.rpc.streams:pull"
_END = b"torchweft.rpc.streams:end"

_numbers = shared_count(1)


class Stream(Closing, Generic[T]):
    """The values of a remote generator, in order; made by ``stream``. For one thread at a time.

    An iterator, also an asynchronous one, and a context manager that closes it. Dropping it closes
    it as well.
    """

    _is_asking = False
    """Whether a value is being asked for, or that was interrupted: nobody knows how far."""

    def __init__(
        self, worker: Worker, peer: Peer, number: int, name: str, ahead: int, limit_s: float
    ) -> None:
        self._worker = worker
        self._peer = peer
        self._number = number
        self._name = name
        self._subject = _subject_of(name)
        self.limit_s = limit_s
        """How long a value is waited for at most, in seconds; infinity for no limit."""
        self._context_id = current_id()
        self._places = shared_count()
        self._pulled: deque[Future[Any]] = deque()
        self._has_ended = False
        for _ in range(ahead):
            self._pull()

    @property
    def worker_name(self) -> str:
        """Name of the worker that runs the generator."""
        return self._peer.name

    def tell_next(self, arrivals: Arrivals, number: int) -> None:
        """Has a number arrive, maybe at once, when ``next`` will not block."""
        if self._pulled:
            arrivals.expect(self._pulled[0], number)
        else:
            arrivals.put(number)  # The stream has ended, or its worker is lost.

    def _pull(self) -> None:
        self._is_asking = True
        args = (self._number, next(self._places))
        try:
            # The stream may outlive the call within which it was opened, and has the time it takes.
            with detached(), enter(self._context_id):
                future = start(self._worker, self._peer, _PULL, args, {}, 0.0, self._subject)
        except Exception as error:
            self._is_asking = is_of_handler(error)
            raise
        ignore_errors(future)
        self._pulled.append(future)
        self._is_asking = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Returns the next value. Blocks until it is there.

        Raises:
            StopIteration: The generator has ended, or the stream was closed.
            CallTimeout: The value did not come in time. The stream goes on: it may come later.
            WorkerLost: The worker of the generator was lost.
            CallCancelled: A signal handler has raised an error while this stream asked for a value,
                which ends the stream.
            Exception: The error of the generator, which ends the stream.
        """
        if self._has_ended:
            raise StopIteration
        if self._is_asking:
            self.close()
            raise CallCancelled(
                f"the stream of {self._name} on worker {self._peer.name!r} has ended: a signal "
                "handler interrupted it while it asked for a value"
            )
        if not self._pulled:
            self._pull()  # The worker was lost when the last value was taken: raises.
        future = self._pulled[0]
        if not (math.isinf(self.limit_s) or future.done()):
            try:
                for _ in as_completed([future], self.limit_s):
                    pass
            except CallTimeout as error:
                raise self._late(error.elapsed_s) from None
        try:
            found = future.wait()
        except Exception as error:
            if not is_of_handler(error):  # Else the value may be taken later.
                self.close()
            raise
        self._pulled.popleft()
        if not found:
            self.close()
            raise StopIteration
        try:
            self._pull()
        except (WorkerLost, NotInitialized):
            pass  # The values that have come are still good; a later use raises.
        value: T = found[0]
        return value

    def _late(self, limit_s: float) -> CallTimeout:
        return CallTimeout(
            f"the stream of {self._name} on worker {self._peer.name!r} had no value within "
            f"{limit_s:.1f} s; it goes on, and the value may be taken later",
            worker=self._peer.name,
            call=self._name,
            elapsed_s=limit_s,
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Does as ``__next__``, in a coroutine; other coroutines go on meanwhile.

        A coroutine that is cancelled leaves the stream open, and the value may be taken later.

        Raises:
            StopAsyncIteration: The generator has ended, or the stream was closed.
            Exception: As ``__next__``.
        """
        if self._pulled and not await until_done(self._pulled[0], self.limit_s):
            raise self._late(self.limit_s)
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """Ends the stream: values that are under way are dropped, the generator is closed.

        Does not block. A generator that computes a value is closed after it; it may query
        ``torchweft.rpc.is_cancelled``. Does nothing to a stream that has ended.
        """
        if not self._has_ended:
            self._has_ended = True
            pulled, self._pulled = self._pulled, deque()
            _give_up(self._worker, self._peer, self._number, pulled)

    def __del__(self) -> None:
        if not getattr(self, "_has_ended", True):
            # As a task: a finalizer may run anywhere.
            given_up = partial(_give_up, self._worker, self._peer, self._number, self._pulled)
            self._worker.agent.reactor.submit(lambda *_: given_up())

    def __repr__(self) -> str:
        state = "ended" if self._has_ended else "open"
        return f"Stream({self._name} on {self._peer.name!r}, {state})"


def _give_up(worker: Worker, peer: Peer, number: int, pulled: Iterable[Future[Any]] = ()) -> None:
    """Drops the values of a stream that are under way, and has its generator closed."""
    for future in pulled:
        future.cancel()
    try:
        with detached():
            ignore_errors(start(worker, peer, _END, (number,), {}, 0.0))
    except Exception as error:
        if is_of_handler(error):
            raise
        # The worker is lost, or this one has left: the generator ends all the same.


def _subject_of(name: str) -> str:
    """Returns the name of a call for a value of a stream, in messages and counts."""
    return f"a value of the stream of {name}"


@without_own_frames
def stream(
    to: Destination | RRef[Any],
    func: Callable[..., Iterable[T] | AsyncIterable[T]],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    ahead: int = 4,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Stream[T]:
    """Runs a generator on another worker and returns an iterator over its values.

    The generator runs in a thread of its own; an asynchronous one (``async def`` with ``yield``)
    runs on the event loop of its worker, and is cancelled if it computes when the stream is closed.
    It computes at most ``ahead`` values more than have been taken, so a slow consumer slows it
    down. Values are sent one by one, like results of calls; in an autograd context they are part of
    its graph. The generator ends when the stream is closed or dropped, or when either worker is
    lost; its ``finally`` blocks run. Blocks until the generator is made.

    Args:
        to: The worker, as for ``rpc_sync``, or a reference to the object whose method it is.
        func: A generator function, plain or ``async``, or any function that returns an iterable;
            for a reference, a method as its class has it, ``Sampler.samples``.
        args: As for ``rpc_sync``.
        kwargs: As for ``rpc_sync``.
        ahead: How many values may be under way, from 1 to 4,096.
        timeout: Seconds to wait for a value at most; 0 for no limit, by default the worker's
            ``rpc_timeout``.

    Raises:
        ConfigurationError: ``ahead`` is out of range.
        ArgumentTypeError: What the function returns cannot be iterated over.
        Exception: As ``rpc_sync``.

    Example::

        with rpc.stream("sampler", generate, args=(prompts,), ahead=2) as samples:
            for tokens in samples:
                learn(tokens)
    """
    if type(ahead) is not int or not 1 <= ahead <= MOST_AHEAD:
        raise ConfigurationError(f"ahead={ahead!r}: pass a number from 1 to {MOST_AHEAD}")
    agent = current()
    worker = agent.slots[WORKER]
    limit_s = limit_of(timeout, agent.default_timeout_s)
    if isinstance(to, RRef):
        to.agent()
        peer = agent.peers[to.id.owner]
        name = method_name(func)
        check_method(to, name)
        named: Any = name
    else:
        peer, named = agent.find(to), func
        name = getattr(func, "__qualname__", repr(func))
    _, args, kwargs = checked_call(func, args, kwargs)
    number = next(_numbers)
    begun = (number, named, tuple(args), kwargs, to if isinstance(to, RRef) else None)
    try:
        call_and_wait(worker, peer, _BEGIN, begun, {}, timeout, _subject_of(name))
        return Stream(worker, peer, number, name, ahead, limit_s)
    except BaseException:
        _give_up(worker, peer, number)  # It may have begun, or still do so.
        raise


Failed = Callable[[Stream[T], Exception], object]


class Merged(Closing, Generic[T]):
    """Values of several streams as they come; made by ``merged``. For one thread at a time.

    An iterator of streams with their values, also an asynchronous one, and a context manager that
    closes the streams.
    """

    def __init__(self, failed: Failed[T] | None, timeout: float | None) -> None:
        self._failed = failed
        self._limit_s = None if timeout is None else limit_of(timeout, math.inf)
        self._numbers = shared_count()
        self._open: dict[int, Stream[T]] = {}
        self._is_taking = False
        """Whether a value is being taken, or this was interrupted."""
        # The numbers of streams, as a stream that nobody else holds must end with this object.
        self._arrivals = Arrivals()

    @property
    def streams(self) -> list[Stream[T]]:
        """The streams that have neither ended nor failed."""
        return list(self._open.values())

    def add(self, stream: Stream[T]) -> None:
        """Merges another stream, for instance that of a worker which was restarted.

        Raises:
            ArgumentTypeError: It is no stream.
            ConfigurationError: It is merged already.
        """
        check_type(stream, Stream, "stream", "what rpc.stream returns")
        if any(stream is each for each in self._open.values()):
            raise ConfigurationError(f"{stream!r} is merged already")
        number = next(self._numbers)
        self._open[number] = stream
        stream.tell_next(self._arrivals, number)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Stream[T], T]:
        """Returns a stream and its next value. Blocks until one of them has one.

        Raises:
            StopIteration: All streams have ended.
            CallTimeout: No value came in time. The streams go on.
            Exception: The error of a stream, which is left out from then on, unless ``failed``
                takes it. The others may be iterated over further.
        """
        self._begin_taking()
        while self._open:
            limit_s = self._limit_now_s()
            until_s = time.monotonic() + limit_s
            taken = self._take(next_done(self._arrivals.queue, until_s, self._pulled), limit_s)
            if taken is not None:
                return taken
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[Stream[T], T]:
        """Does as ``__next__``, in a coroutine; other coroutines go on meanwhile.

        Raises:
            StopAsyncIteration: All streams have ended.
            Exception: As ``__next__``.
        """
        self._begin_taking()
        while self._open:
            limit_s = self._limit_now_s()
            heads = [each._pulled[0] for each in self.streams if each._pulled]
            number = await self._arrivals.next(time.monotonic() + limit_s, heads)
            taken = self._take(number, limit_s)
            if taken is not None:
                return taken
        raise StopAsyncIteration

    def _begin_taking(self) -> None:
        if self._is_taking:  # An interrupt may have lost some news, at any step.
            self._arrivals = Arrivals()
            for number, stream in self._open.items():
                stream.tell_next(self._arrivals, number)
        self._is_taking = True

    def _take(self, number: int | None, limit_s: float) -> tuple[Stream[T], T] | None:
        """Returns a stream that has news, and its next value; None if it has none any more."""
        if number is None:
            self._is_taking = False
            raise CallTimeout(
                f"none of these streams had a value within {limit_s:.1f} s: "
                f"{', '.join(map(repr, self._open.values()))}",
                worker=next(iter(self._open.values())).worker_name,
                elapsed_s=limit_s,
            )
        stream = self._open[number]
        try:
            value = next(stream)
        except StopIteration:
            del self._open[number]
        except Exception as error:
            if is_of_handler(error):
                raise
            del self._open[number]
            if self._failed is None:
                self._is_taking = False
                raise
            self._failed(stream, error)
        else:
            stream.tell_next(self._arrivals, number)
            self._is_taking = False
            return stream, value
        return None

    def _limit_now_s(self) -> float:
        limit_s = self._limit_s
        if limit_s is None:
            limit_s = max(each.limit_s for each in self._open.values())
        return min(limit_s, remaining_time())

    def _pulled(self) -> list[PendingCall]:
        pulled = [each._pulled for each in self.streams]
        return open_calls([each[0] for each in pulled if each])

    def close(self) -> None:
        """Closes all streams. Does not block."""
        streams, self._open = self._open, {}
        for stream in streams.values():
            stream.close()

    def __repr__(self) -> str:
        return f"Merged({', '.join(map(repr, self._open.values()))})"


def merged(
    streams: Iterable[Stream[T]],
    *,
    failed: Failed[T] | None = None,
    timeout: float | None = None,
) -> Merged[T]:
    """Returns an iterator over the values of several streams, in the order in which they come.

    Each comes with its stream. Streams that have values take turns, so a fast one does not keep the
    values of a slow one waiting. A generator is no further ahead than its stream allows: it goes on
    when one of its values is taken. A stream that has ended leaves the others.

    Args:
        streams: What ``stream`` returns, of any workers. They are closed with the result, if that
            is used as a context manager.
        failed: Called with a stream that has failed, as its worker was lost or its generator raised
            an error, and the error; the others go on. Without it the error is raised.
        timeout: Seconds to wait for the next value of any stream at most; 0 for no limit, by
            default the longest limit of the streams.

    Raises:
        ArgumentTypeError: An element of ``streams`` is no stream.
        ConfigurationError: A stream is there twice.

    Example::

        streams = [rpc.stream(each, Sampler.samples, (64,)) for each in samplers]
        with rpc.merged(streams, failed=lambda stream, error: print("left out:", error)) as found:
            for stream, samples in found:
                learn(samples)
    """
    made: Merged[T] = Merged(failed, timeout)
    if isinstance(streams, Stream) or not isinstance(streams, Iterable):
        raise wrong_type("streams", streams, "pass several streams, as a list")
    for each in streams:
        made.add(each)
    return made


# The worker of the generator: functions that other workers call


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
