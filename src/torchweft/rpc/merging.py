"""``torchweft.rpc.merged``: the values of several streams, in the order in which they come."""

from __future__ import annotations

import functools
import math
import queue
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from torchweft.agent.calls import PendingCall
from torchweft.arguments import limit_of, wrong_type
from torchweft.closing import Closing
from torchweft.errors import CallTimeout, ConfigurationError
from torchweft.free_threading import shared_count
from torchweft.rpc.current_call import remaining_time
from torchweft.rpc.fan_out import next_done
from torchweft.rpc.futures import open_calls
from torchweft.rpc.streams import Stream

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
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
