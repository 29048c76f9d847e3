"""Streams of values that a generator of another worker yields, and several of them ``merged``."""

from __future__ import annotations

import functools
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from torchweft.arguments import limit_of, wrong_type
from torchweft.autograd.contexts import current_id, enter
from torchweft.closing import Closing
from torchweft.errors import CallTimeout, ConfigurationError, NotInitialized, WorkerLost
from torchweft.free_threading import shared_count
from torchweft.rpc.api import method_name
from torchweft.rpc.calls import Destination, call_and_wait, checked_call, start
from torchweft.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.rpc.current_call import detached, remaining_time
from torchweft.rpc.futures import Future, ignore_errors, open_calls
from torchweft.rpc.rref import RRef, check_method
from torchweft.rpc.several import as_completed, next_done
from torchweft.rpc.stream_sources import MOST_AHEAD
from torchweft.rpc.worker import WORKER, Worker
from torchweft.serialize.tracebacks import shorten
from torchweft.worker.calls import PendingCall
from torchweft.worker.current import current
from torchweft.worker.peers import Peer

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

_BEGIN = b"torchweft.rpc.stream_sources:begin"
_PULL = b"torchweft.rpc.stream_sources:pull"
_END = b"torchweft.rpc.stream_sources:end"

_numbers = shared_count(1)


class Stream(Closing, Generic[T]):
    """The values of a remote generator, in order; made by ``stream``. For one thread at a time.

    An iterator, and a context manager that closes it. Dropping it closes it as well.
    """

    def __init__(
        self, worker: Worker, peer: Peer, number: int, name: str, ahead: int, timeout_s: float
    ) -> None:
        self._worker = worker
        self._peer = peer
        self._number = number
        self._name = name
        self._subject = subject_of(name)
        self._timeout_s = timeout_s
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

    @property
    def limit_s(self) -> float:
        """How long a value is waited for at most, in seconds; infinity for no limit."""
        return self._timeout_s or math.inf

    def tell_next(self, tell: Callable[[], object]) -> None:
        """Calls ``tell`` from any thread, maybe at once, when ``next`` will not block."""
        if self._pulled:
            # Bypasses Weft's class: being told of the end does not count as looking at the error.
            torch._C.Future.add_done_callback(self._pulled[0], lambda _: tell())
        else:
            tell()  # The stream has ended, or its worker is lost.

    def _pull(self) -> None:
        args = (self._number, next(self._places))
        # The stream may outlive the call within which it was opened, and has the time it takes.
        with detached(), enter(self._context_id):
            future = start(self._worker, self._peer, _PULL, args, {}, 0.0, self._subject)
        ignore_errors(future)
        self._pulled.append(future)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Returns the next value. Blocks until it is there.

        Raises:
            StopIteration: The generator has ended, or the stream was closed.
            CallTimeout: The value did not come in time. The stream goes on: it may come later.
            WorkerLost: The worker of the generator was lost.
            Exception: The error of the generator, which ends the stream.
        """
        if self._has_ended:
            raise StopIteration
        if not self._pulled:
            self._pull()  # The worker was lost when the last value was taken: raises.
        future = self._pulled[0]
        if self._timeout_s and not future.done():
            try:
                for _ in as_completed([future], self._timeout_s):
                    pass
            except CallTimeout as error:
                raise CallTimeout(
                    f"the stream of {self._name} on worker {self._peer.name!r} had no value within "
                    f"{error.elapsed_s:.1f} s; it goes on, and the value may be taken later",
                    worker=self._peer.name,
                    call=self._name,
                    elapsed_s=error.elapsed_s,
                ) from None
        try:
            found = future.wait()
        except Exception:
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

    def close(self) -> None:
        """Ends the stream: values that are under way are dropped, the generator is closed.

        Does not block. A generator that computes a value is closed after it; it may query
        ``torchweft.rpc.is_cancelled``. Does nothing to a stream that has ended.
        """
        if self._has_ended:
            return
        self._has_ended = True
        pulled, self._pulled = self._pulled, deque()
        for future in pulled:
            future.cancel()
        _end(self._worker, self._peer, self._number)

    def __del__(self) -> None:
        if not getattr(self, "_has_ended", True):
            # As a task: a finalizer may run anywhere.
            _close_soon(self._worker, self._peer, self._number, self._pulled)

    def __repr__(self) -> str:
        state = "ended" if self._has_ended else "open"
        return f"Stream({self._name} on {self._peer.name!r}, {state})"


def _end(worker: Worker, peer: Peer, number: int) -> None:
    try:
        with detached():
            ignore_errors(start(worker, peer, _END, (number,), {}, 0.0))
    except Exception:
        pass  # The worker is lost, or this one has left: the generator ends all the same.


def _close_soon(worker: Worker, peer: Peer, number: int, pulled: deque[Future[Any]]) -> None:
    def close(_: object, __: object) -> None:
        abandoned: Stream[Any] = Stream.__new__(Stream)
        abandoned._worker, abandoned._peer, abandoned._number = worker, peer, number
        abandoned._pulled, abandoned._has_ended = pulled, False
        abandoned.close()

    worker.agent.reactor.submit(close)


def subject_of(name: str) -> str:
    """Returns the name of a call for a value of a stream, in messages and counts."""
    return f"a value of the stream of {name}"


def stream(
    to: Destination | RRef[Any],
    func: Callable[..., Iterable[T]],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    ahead: int = 4,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Stream[T]:
    """Runs a generator on another worker and returns an iterator over its values.

    The generator runs in a thread of its own. It computes at most ``ahead`` values more than have
    been taken, so a slow consumer slows it down. Values are sent one by one, like results of calls;
    in an autograd context they are part of its graph. The generator ends when the stream is closed
    or dropped, or when either worker is lost; its ``finally`` blocks run. Blocks until the
    generator is made.

    Args:
        to: The worker, as for ``rpc_sync``, or a reference to the object whose method it is.
        func: A generator function, or any function that returns an iterable; for a reference, a
            method as its class has it, ``Sampler.samples``.
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
    try:
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
            call_and_wait(worker, peer, _BEGIN, begun, {}, timeout, subject_of(name))
            limit_s = 0.0 if math.isinf(limit_s) else limit_s
            return Stream(worker, peer, number, name, ahead, limit_s)
        except BaseException:
            _end(worker, peer, number)  # It may have begun, or still do so.
            raise
    except Exception as error:
        shorten(error)
        raise


Failed = Callable[[Stream[T], Exception], object]


class Merged(Closing, Generic[T]):
    """Values of several streams as they come; made by ``merged``. For one thread at a time.

    An iterator of streams with their values, and a context manager that closes the streams.
    """

    def __init__(self, failed: Failed[T] | None, timeout: float | None) -> None:
        self._failed = failed
        self._limit_s = None if timeout is None else limit_of(timeout, math.inf)
        self._numbers = shared_count()
        self._open: dict[int, Stream[T]] = {}
        # The numbers of streams, as a stream that nobody else holds must end with this object.
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()

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
        if not isinstance(stream, Stream):
            raise wrong_type("stream", stream, "pass what rpc.stream returns")
        if any(stream is each for each in self._open.values()):
            raise ConfigurationError(f"{stream!r} is merged already")
        number = next(self._numbers)
        self._open[number] = stream
        stream.tell_next(functools.partial(self._arrived.put, number))

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
        while self._open:
            number = self._next_number()
            stream = self._open[number]
            try:
                value = next(stream)
            except StopIteration:
                del self._open[number]
            except Exception as error:
                del self._open[number]
                if self._failed is None:
                    raise
                self._failed(stream, error)
            else:
                stream.tell_next(functools.partial(self._arrived.put, number))
                return stream, value
        raise StopIteration

    def _next_number(self) -> int:
        limit_s = self._limit_s
        if limit_s is None:
            limit_s = max(each.limit_s for each in self._open.values())
        limit_s = min(limit_s, remaining_time())
        number = next_done(self._arrived, time.monotonic() + limit_s, self._pulled)
        if number is None:
            raise CallTimeout(
                f"none of these streams had a value within {limit_s:.1f} s: "
                f"{', '.join(map(repr, self._open.values()))}",
                worker=next(iter(self._open.values())).worker_name,
                elapsed_s=limit_s,
            )
        return number

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
