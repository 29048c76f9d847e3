"""One map and its future: runs a function over the parts of its arguments, reduces the results."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from torchweft.engine.threads.reactor import Reactor
from torchweft.engine.worker.current import current
from torchweft.errors import AutogradError
from torchweft.mapreduce.buffers import Buffers
from torchweft.mapreduce.execution import Execution, surroundings
from torchweft.mapreduce.parts import Cut
from torchweft.mapreduce.plan import Manner, make_plan, may_have_graph
from torchweft.mapreduce.reducers import Reducer, reduce
from torchweft.mapreduce.replay import Results
from torchweft.rpc.futures import Future, OrderedFuture, begin, fail, open_calls
from torchweft.rpc.worker import WORKER

T = TypeVar("T")
OpenCalls = Callable[[], Sequence[Future[Any]]]
"""Returns the futures of calls that have not ended. Does not block."""

_LOOK_S = 0.5
"""How often a waiting thread checks whether the worker has shut down."""


class MapFuture(OrderedFuture[T]):
    """The result of a map that may not be there yet.

    Works with ``then``, ``add_done_callback``, ``torch.futures.collect_all`` and ``wait_all``, and
    with ``await`` and ``asyncio.wait``.

    Args:
        reactor: Runs the tasks of this worker.
    """

    __slots__ = ("_calls", "_give_up", "_over", "_reactor")

    def __init__(self, reactor: Reactor) -> None:
        begin(self)
        self._reactor = reactor
        self._over = threading.Event()
        self._give_up: Callable[[], bool] | None = None
        self._calls: OpenCalls = list

    def can_cancel(self, give_up: Callable[[], bool], calls: OpenCalls = list) -> None:
        """Has ``cancel`` call ``give_up``, and reports look at the open ``calls``."""
        self._give_up, self._calls = give_up, calls

    def complete(self, result: T) -> None:
        """Completes it with a result."""
        # Otherwise a reference cycle: the garbage collector cannot see futures.
        self._give_up, self._calls = None, list
        self._over.set()  # First: callbacks may take long.
        self.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Completes it with an error; each waiter raises its own copy."""
        self._give_up, self._calls = None, list
        self._over.set()
        fail(self, error)

    def wait(self) -> T:
        """Blocks until all parts have ended and their results are reduced; returns the result.

        A wait while serving a call does not keep this worker from serving other calls.

        Raises:
            CallTimeout: A part took too long.
            WorkerLost: Workers were lost, and no worker is left to run the parts.
            ReduceError: The reducer failed.
            Exception: A part raised it.
        """
        if not self.done():
            wait_for(self._reactor, self._over, self.cancel, lambda: self._calls())
        return super().wait()

    def cancel(self) -> bool:
        """Gives the map up: it fails with ``CallCancelled``, and running calls are cancelled.

        Returns:
            False if the map was over already.
        """
        give_up = self._give_up
        return give_up is not None and give_up()

    def __await__(self) -> Generator[Any, None, T]:
        return Future.__await__(self)  # type: ignore[arg-type]


def wait_for(
    reactor: Reactor, over: threading.Event, give_up: Callable[[], object], calls: OpenCalls
) -> None:
    """Blocks until a map is over, and lets other tasks use this worker's threads meanwhile.

    Args:
        reactor: Runs the tasks of this worker. If it closes, the tasks that would set ``over`` may
            never run.
        over: Set at the end of the map.
        give_up: Ends the map if the reactor closes.
        calls: Returns the calls that it waits for, for reports.
    """
    with reactor.waiting(lambda: open_calls(calls())):
        while not over.wait(_LOOK_S):
            if reactor.is_closing:
                give_up()


class MapCall:
    """One map.

    Args:
        function: The function to call for each part.
        cut: The parts.
        manner: How to run the parts.
    """

    def __init__(self, function: Callable[..., Any], cut: Cut, manner: Manner) -> None:
        self._agent = current()
        self._worker = self._agent.slots[WORKER]
        given = (*cut.workers, *(part[0] for part in cut.parts))
        self._peers = {rank: self._agent.find(rank) for rank in given}
        self._surroundings = surroundings()
        first = cut.parts[0][1:] if cut.parts else ((), {})
        self._buffers = Buffers(function, *first)
        peers = list(self._peers.values())
        self._plan = make_plan(self._worker, function, cut, manner, peers, self._buffers)

    def begin(self, reducer: Reducer | None) -> MapFuture[Any]:
        """Sends the first parts, and returns the future of the reduced results."""
        future: MapFuture[Any] = MapFuture(self._agent.reactor)

        def done(results: list[Any] | None, error: BaseException | None) -> None:
            if results is None:
                assert error is not None
                future.fail(error)
                return
            try:
                self._buffers.update(execution.changed)
                self._keep(results)
                reduced = self._reduced(reducer, results)
            except BaseException as failure:
                future.fail(failure)
            else:
                future.complete(reduced)

        execution = Execution(self._plan, self._peers, self._worker, done)
        future.can_cancel(execution.cancel, execution.open_calls)
        execution.begin()
        return future

    def run_again(self) -> list[Any]:
        """Runs all parts again on the remaining workers, in the same autograd context. Blocks.

        Returns:
            The results in the order of the parts.

        Raises:
            WorkerLost: No worker is left, or the parts must not run twice.
            Exception: A part raised it.
        """
        over = threading.Event()
        outcome: list[tuple[list[Any] | None, BaseException | None]] = []

        def done(results: list[Any] | None, error: BaseException | None) -> None:
            outcome.append((results, error))
            over.set()

        def begin() -> Execution:
            execution = Execution(self._plan, self._peers, self._worker, done)
            execution.begin()
            return execution

        execution = self._surroundings.for_this_call().run(begin)
        try:
            wait_for(self._agent.reactor, over, execution.cancel, execution.open_calls)
        except BaseException:
            execution.cancel()  # Ctrl-C: no thread waits for the results any more.
            raise
        results, error = outcome[0]
        if results is None:
            assert error is not None
            raise error
        return results

    def _keep(self, results: list[Any]) -> None:
        """Records the map in its context, so that a backward pass can run it again after a loss."""
        if self._surroundings.is_recorded and any(map(may_have_graph, results)):
            with contextlib.suppress(AutogradError):  # The program has left the context.
                context = self._worker.contexts.get(self._surroundings.context_id)
                context.maps.append(Results(results, self))

    def _reduced(self, reducer: Reducer | None, results: list[Any]) -> Any:
        if reducer is None:
            return list(results)
        self._agent.reactor.arm_all()  # The reducer may take long.
        return reduce(reducer, list(results), [part.weight for part in self._plan.parts])
