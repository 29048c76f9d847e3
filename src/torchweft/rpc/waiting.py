"""Waits for several futures, by threads and by coroutines.

A future tells of its end by a callback of PyTorch's, which cannot be taken back. So each wait adds
one callback to each future, and a thread that waits takes what is done from a queue. A coroutine
takes it from the same queue, and is woken on its event loop by a second callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
from collections.abc import Iterable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from torchweft.arguments import check_type, wrong_type
from torchweft.engine.threads.reports import first_names
from torchweft.engine.worker.calls import PendingCall, current_call
from torchweft.errors import CallTimeout, ConfigurationError
from torchweft.rpc.calls import Future, OnLoop, next_done, open_calls
from torchweft.rpc.serving import remaining_time

if TYPE_CHECKING:
    from typing_extensions import Self

AnyFuture = TypeVar("AnyFuture", bound=torch.futures.Future[Any])


class Arrivals:
    """The numbers of futures that are done, in this order.

    Threads may wait and tell at the same time. Coroutines that wait are all of one event loop.
    """

    def __init__(self) -> None:
        # Numbers, as a future that holds itself would never be freed.
        self.queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._news: asyncio.Event | None = None
        self._wakes: OnLoop | None = None

    def expect(self, future: torch.futures.Future[Any], number: int) -> None:
        """Has a number arrive when a future is done, maybe at once."""
        # Bypasses Weft's class: being told of the end does not count as looking at the error.
        # Only C runs in the callback, which ignores its future: torch would drop what a signal
        # handler raises in Python code there.
        torch._C.Future.add_done_callback(future, partial(self.queue.put, number))
        if self._wakes is not None:
            torch._C.Future.add_done_callback(future, self._wakes)

    def put(self, number: int) -> None:
        """Has a number arrive at once."""
        self.queue.put(number)
        if self._wakes is not None:
            self._wakes(None)

    async def next(
        self, deadline_s: float, expected: Iterable[torch.futures.Future[Any]]
    ) -> int | None:
        """Returns the next number, or None at the deadline. Does not block the event loop.

        Args:
            deadline_s: By the clock of ``time.monotonic``.
            expected: The futures whose numbers have not been taken.
        """
        if self._news is None:
            news = self._news = asyncio.Event()
            self._wakes = OnLoop(asyncio.get_running_loop(), lambda _: news.set())
            for future in expected:
                torch._C.Future.add_done_callback(future, self._wakes)
        while True:
            self._news.clear()
            with contextlib.suppress(queue.Empty):
                return self.queue.get_nowait()
            left_s = None if math.isinf(deadline_s) else max(deadline_s - monotonic(), 0.0)
            try:
                await asyncio.wait_for(self._news.wait(), left_s)
            except asyncio.TimeoutError:
                return None


async def until_done(future: torch.futures.Future[Any], limit_s: float) -> bool:
    """Waits in a coroutine for a future, which goes on if the coroutine is cancelled.

    Returns:
        Whether it is done.
    """
    arrivals = Arrivals()
    arrivals.expect(future, 0)
    await arrivals.next(monotonic() + limit_s, [future])
    return future.done()


class AsCompleted(Generic[AnyFuture]):
    """Futures as they end; made by ``as_completed``. An iterator, and an asynchronous one."""

    def __init__(self, futures: Iterable[AnyFuture], timeout: float) -> None:
        self._pending: dict[int, AnyFuture] = {}
        self._arrivals = Arrivals()
        self._limit_s = _limit(timeout if timeout > 0 else None)
        self._deadline_s = monotonic() + self._limit_s
        for future in futures:
            self._expect(future)

    def add(self, future: AnyFuture) -> None:
        """Has another future yielded as well when it is done. May be called while iterating.

        Raises:
            ArgumentTypeError: It is no future.
        """
        self._expect(_checked(future))

    def _expect(self, future: AnyFuture) -> None:
        if id(future) not in self._pending:
            self._pending[id(future)] = future
            self._arrivals.expect(future, id(future))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AnyFuture:
        """Returns the next future that is done. Blocks until there is one.

        Raises:
            StopIteration: All have been returned.
            CallTimeout: The time is up.
        """
        if not self._pending:
            raise StopIteration
        return self._taken(next_done(self._arrivals.queue, self._deadline_s, self._open_calls))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnyFuture:
        """Does as ``__next__``, in a coroutine; other coroutines go on meanwhile.

        Raises:
            StopAsyncIteration: All have been returned.
            CallTimeout: The time is up.
        """
        if not self._pending:
            raise StopAsyncIteration
        return self._taken(await self._arrivals.next(self._deadline_s, self._pending.values()))

    def _taken(self, number: int | None) -> AnyFuture:
        if number is None:
            raise _timed_out(list(self._pending.values()), self._limit_s)
        return self._pending.pop(number)

    def _open_calls(self) -> list[PendingCall]:
        return open_calls(self._pending.copy().values())


def as_completed(futures: Iterable[AnyFuture], timeout: float = 0.0) -> AsCompleted[AnyFuture]:
    """Returns an iterator that yields each future as soon as it is done, failed or not.

    The iterator blocks while none is done; ``async for`` over it does not. ``wait`` of a future
    that it yields returns at once, and raises the error of a call that failed. Each future is
    yielded once. ``add`` has another one yielded, also while iterating. Thread-safe; several
    iterators may go over the same futures.

    Args:
        futures: Futures of calls, or any ``torch.futures.Future``.
        timeout: Seconds from now until all are done; 0 for no limit. Calls end by themselves
            after their own timeout. In a function that another worker has called, at most as long
            as its caller waits.

    Raises:
        CallTimeout: The time is up; names the workers whose calls have not ended. Raised by the
            iterator, which has yielded all futures done by then. The calls go on.
        ArgumentTypeError: An element of ``futures`` is not a future.

    Example::

        running = rpc.as_completed([rpc.rpc_async(worker, score, args=(next(batches),))
                                    for worker in workers])
        for future in running:
            scores.append(future.wait())
            if batch := next(batches, None):  # the next piece for the worker that is free
                running.add(rpc.rpc_async(future.worker_name, score, args=(batch,)))
    """
    return AsCompleted(_all_checked(futures), timeout)


def wait(
    futures: Iterable[AnyFuture], num_returns: int = 1, timeout: float | None = None
) -> tuple[list[AnyFuture], list[AnyFuture]]:
    """Waits until some of several futures are done, and raises none of their errors. Blocks.

    In a coroutine use ``asyncio.wait``, which takes the same futures.

    Args:
        futures: Futures of calls, or any ``torch.futures.Future``.
        num_returns: How many to wait for.
        timeout: Seconds to wait at most; by default without a limit, 0 to look only. In a function
            that another worker has called, at most as long as its caller waits.

    Returns:
        At most ``num_returns`` futures that are done, fewer if the time is up; and the others. Both
        in the order of ``futures``.

    Raises:
        ArgumentTypeError: An element of ``futures`` is not a future.
        ConfigurationError: There are fewer futures than ``num_returns``, or that is less than 1.

    Example::

        done, running = rpc.wait(running, num_returns=2, timeout=1.0)
    """
    found = _all_checked(futures)
    if type(num_returns) is not int or not 1 <= num_returns <= len(found):
        raise ConfigurationError(
            f"num_returns={num_returns!r} of {len(found)} futures; pass a number from 1 to as many"
        )
    deadline_s = monotonic() + _limit(timeout)
    lacking = num_returns - sum(future.done() for future in found)
    if lacking > 0:
        arrivals, awaited = Arrivals(), partial(open_calls, found)
        for future in found:
            if not future.done():
                arrivals.expect(future, 0)
        while lacking > 0 and next_done(arrivals.queue, deadline_s, awaited) is not None:
            lacking -= 1
    done = [future for future in found if future.done()][:num_returns]
    returned = {id(future) for future in done}
    return done, [future for future in found if id(future) not in returned]


def _limit(timeout: float | None) -> float:
    limit_s = math.inf if timeout is None else timeout
    return limit_s if current_call.get() is None else min(limit_s, remaining_time())


def _all_checked(futures: Iterable[AnyFuture]) -> list[AnyFuture]:
    if isinstance(futures, torch.futures.Future) or not isinstance(futures, Iterable):
        raise wrong_type("futures", futures, "pass several futures, as a list")
    return [_checked(future) for future in futures]


def _checked(future: AnyFuture) -> AnyFuture:
    check_type(future, torch.futures.Future, "an element of futures", "what rpc_async returns")
    return future


def _timed_out(pending: Sequence[torch.futures.Future[Any]], limit_s: float) -> CallTimeout:
    workers = [future.worker_name for future in pending if isinstance(future, Future)]
    on = f": on {first_names(workers)}" if workers else ""
    calls = "1 call has" if len(pending) == 1 else f"{len(pending)} calls have"
    return CallTimeout(
        f"{calls} not ended within {limit_s:.1f} s{on}",
        worker=workers[0] if workers else "",
        elapsed_s=limit_s,
    )
