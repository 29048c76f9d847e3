"""One map: runs a function over the parts of its arguments, and reduces the results."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from torchweft.agent.current import current
from torchweft.errors import AutogradError
from torchweft.mapreduce.execution import Execution
from torchweft.mapreduce.map_future import MapFuture, wait_for
from torchweft.mapreduce.parts import Cut
from torchweft.mapreduce.plan import Manner, make_plan
from torchweft.mapreduce.reducers import Reducer, reduce
from torchweft.mapreduce.replay import Results
from torchweft.mapreduce.sharing import may_have_graph
from torchweft.mapreduce.surroundings import surroundings
from torchweft.rpc.worker import WORKER


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
        self._plan = make_plan(self._worker, function, cut, manner, list(self._peers.values()))

    def begin(self, reducer: Reducer | None) -> MapFuture[Any]:
        """Sends the first parts, and returns the future of the reduced results."""
        future: MapFuture[Any] = MapFuture(self._agent.reactor)

        def done(results: list[Any] | None, error: BaseException | None) -> None:
            if results is None:
                assert error is not None
                future.fail(error)
                return
            try:
                self._keep(results)
                reduced = self._reduced(reducer, results)
            except BaseException as failure:
                future.fail(failure)
            else:
                future.complete(reduced)

        execution = Execution(self._plan, self._peers, self._worker, done)
        future.can_cancel(execution.cancel)
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

        with self._surroundings._replace(call=surroundings().call).entered():
            execution = Execution(self._plan, self._peers, self._worker, done)
            execution.begin()
        try:
            wait_for(self._agent.reactor, over, execution.cancel)
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
