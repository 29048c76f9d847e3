"""Runs the parts of a map once: carries out the schedule's actions, and reports events to it.

Events arrive on any thread. The schedule takes them under a lock, and its actions go to a queue.
One thread at a time executes the queue, outside the lock, so actions are executed in the order in
which they were decided; other threads only append. Most actions are fast. An action that may take
long, because it sends much, is left to a task: the thread that delivers an answer has other
answers to deliver.

An unexpected exception here ends the map, since a caller waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from torchweft.autograd.contexts import current_id
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Mark
from torchweft.engine.threads.reactor import Reactor
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.worker.calls import current_call
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.references import Handle
from torchweft.errors import AutogradError, CallCancelled, NotInitialized, WorkerLost
from torchweft.free_threading import shared_count
from torchweft.mapreduce import shared
from torchweft.mapreduce.autograd import Results
from torchweft.mapreduce.observers import observers
from torchweft.mapreduce.partitioners import Cut
from torchweft.mapreduce.plan import Manner, Plan, is_light, make_plan, may_have_graph
from torchweft.mapreduce.reducers import Reducer, reduce
from torchweft.mapreduce.schedule import (
    Action,
    Begin,
    Cancel,
    Complete,
    Fail,
    Lost,
    Make,
    Moved,
    Schedule,
    Start,
)
from torchweft.mapreduce.shared import NOTHING, Buffers, Changed, Outcome
from torchweft.rpc.calls import (
    Future,
    OrderedFuture,
    begin,
    create,
    fail,
    open_calls,
    start,
    wait_unseen,
)
from torchweft.rpc.worker import WORKER, Worker

OnDone = Callable[[list[Any] | None, BaseException | None], None]
"""Called with the results in the order of the parts, or with an error."""

_log = logging.getLogger("torchweft")

_SHORTEST_S = 1e-3
_map_ids = shared_count(1)


@dataclass(slots=True)
class _Call:
    """A part that was sent; a part sent ahead has not begun while its worker runs other parts."""

    future: Future[Any]
    worker: Peer
    begun_s: float | None = None


class _Order:
    """Numbers the parts that are sent to one ``Shared`` object, so that they run in that order."""

    __slots__ = ("_ahead", "_begun", "_count")

    def __init__(self) -> None:
        self._count = 0
        self._begun = self._ahead = NOTHING

    def next(self, is_ahead: bool) -> tuple[int, int]:
        """Returns the number of the next part, and the number of the part that it follows."""
        number = self._count
        self._count += 1
        if not is_ahead:
            self._begun = number
            return number, NOTHING
        self._ahead = number
        return number, self._begun

    def advance(self) -> None:
        """Notes that the part that was sent ahead now runs."""
        self._begun = self._ahead


class Execution:
    """One run of all parts of a map.

    Args:
        plan: The plan of the map.
        peers: The workers, by rank. In an open group a rank may belong to another worker by now.
        worker: This worker.
        on_done: Called with the outcome, once, on any thread.
    """

    def __init__(self, plan: Plan, peers: dict[int, Peer], worker: Worker, on_done: OnDone) -> None:
        self._plan = plan
        self._peers = peers
        self._worker = worker
        self._reactor = worker.agent.reactor
        self._on_done: OnDone | None = on_done
        self._map_id = next(_map_ids)
        self._surroundings = surroundings()
        self._end_s = time.monotonic() + plan.limit_s
        self._lock = threading.Lock()
        self._actions: deque[Action] = deque()
        self._is_acting = self._is_left = False
        self._objects: dict[int, Handle | Exception] = {}
        self._orders: dict[int, _Order] = {}
        self._calls: dict[tuple[int, int], _Call] = {}
        self._results: list[Any] = [None] * len(plan.parts)
        self.changed: Sequence[Changed] = ()
        """The buffers of modules that the first part has changed."""
        self._marks: list[Mark] = []  # of the threads that have put results there
        self._error: BaseException | None = None
        self._schedule = Schedule(
            [part[0] for part in plan.parts],
            plan.workers,
            concurrency=plan.manner.concurrency,
            balance=plan.manner.balance,
            may_rerun=plan.may_rerun,
            is_recorded=self._surroundings.is_recorded,
            fan_out=plan.fan_out if plan.content is not None else 0,
            here=next((rank for rank, peer in peers.items() if peer.is_self), None),
            keepers=[rank for rank, peer in peers.items() if plan.keeps_ahead(peer)],
        )

    # Events

    def begin(self) -> None:
        """Sends the first parts. Blocks while it sends."""
        names = [self._peers[rank].name for rank in self._plan.workers]
        observers.tell("begun", self._map_id, self._plan.name, len(self._plan.parts), names)
        with self._lock:
            self._note_losses()
            if not self._schedule.is_over:
                self._actions += self._schedule.begin()
        try:
            self._act(may_block=True)
        except BaseException:
            self.cancel()  # Ctrl-C: the caller gets no future of this map.
            raise

    def cancel(self) -> bool:
        """Gives the map up; returns False if it was over already."""
        error: Exception = CallCancelled("the map was cancelled by its caller")
        if self._reactor.is_closing:
            error = NotInitialized("this worker shut down before the map had ended")
        was_news = self._give_up(error)
        self._act()
        return was_news

    def open_calls(self) -> list[Future[Any]]:
        """Returns the futures of the parts that run, without those sent ahead. Does not block."""
        calls = self._calls.copy().values()
        return [call.future for call in calls if call.begun_s is not None]

    def _give_up(self, error: BaseException) -> bool:
        """Has the map fail with an error; returns False if it is over already."""
        with self._lock:
            if self._schedule.is_over:
                return False
            self._error = error
            self._actions += self._schedule.give_up()
        return True

    def _answered(self, part: int, attempt: int, worker: int, done: Any) -> None:
        self._surroundings.run(self._go_on_with, part, attempt, worker, done)

    def _go_on_with(self, part: int, attempt: int, worker: int, done: Any) -> None:
        try:
            try:
                result = wait_unseen(done)
            except BaseException as error:
                self._failed(part, attempt, worker, error)
            else:
                self._ended(part, attempt, worker, result)
        except BaseException as error:  # Inspecting the result failed.
            self._give_up(error)
        self._act_alone()

    def _ended(self, part: int, attempt: int, worker: int, result: Any) -> None:
        changed: Sequence[Changed] = ()
        if type(result) is Outcome:
            result, changed = result
        has_graph = self._surroundings.is_recorded and may_have_graph(result)
        with self._lock:
            call = self._calls.pop((part, attempt), None)
            # First, or the map might complete with void results. But the answer of a worker that
            # was lost afterwards counts if it has no graph.
            self._note_losses(None if has_graph else worker)
            if not self._schedule.is_current(part, attempt):
                return
            self._results[part] = result
            if changed:
                self.changed = changed
            mark = device_streams.mark() if device_streams.HAS_CUDA else None
            if mark is not None:
                self._marks.append(mark)
            if call is not None:
                # Under the lock, or another thread might report the end of the map before this.
                seconds = time.monotonic() - self._note_begin(part, call)
                observers.tell("ended", self._map_id, part, call.worker.name, seconds)
            self._actions += self._schedule.ended(part, attempt, has_graph)
            self._note_losses()

    def _failed(self, part: int, attempt: int, worker: int, error: BaseException) -> None:
        with self._lock:
            self._calls.pop((part, attempt), None)
            actions = self._schedule.failed(part, attempt, self._lost_by(worker, error))
            if Fail(None) in actions:
                self._error = self._plan.with_note(error, part, self._peers[worker].name)
            self._actions += actions
            self._note_losses()

    def _lost_by(self, worker: int, error: BaseException) -> int | None:
        """Returns the worker of this map whose loss the error of a part reports, or None.

        A part may itself have called a lost worker, and raise that error; the schedule
        tells such a loss from a loss that affects the part.
        """
        if not isinstance(error, WorkerLost):
            return None
        named = [rank for rank, peer in self._peers.items() if peer.name == error.worker]
        if named == [worker] and self._peers[worker].lost is None:
            return None
        return named[0] if named else None

    def _note_losses(self, excepted: int | None = None) -> None:
        """Tells the schedule of workers that were lost meanwhile, whichever thread noticed."""
        for rank in self._schedule.workers:
            if rank != excepted and self._peers[rank].lost is not None:
                self._actions += self._schedule.lost(rank)

    # Actions

    def _act(self, may_block: bool = False) -> None:
        """Executes queued actions, unless another thread does so already."""
        while (action := self._next(may_block)) is not None:
            try:
                _DO[type(action)](self, action)
            except Exception as error:
                if not self._give_up(error):
                    log_exception("the end of a map of %s could not be announced", self._plan.name)
            finally:
                self._is_acting = False

    def _next(self, may_block: bool) -> Action | None:
        with self._lock:
            if self._is_acting or not self._actions:
                return None
            if may_block or not self._takes_time(self._actions[0]):
                self._is_acting = True
                return self._actions.popleft()
            # No thread acts until the task begins; a failure of the map is still reported at once.
            was_left, self._is_left = self._is_left, True
        if not was_left:
            self._reactor.submit_task(self._go_on)
        return None

    def _takes_time(self, action: Action) -> bool:
        if self._schedule.is_over:
            return False
        if isinstance(action, Make):
            return self._plan.content_for(self._peers[action.worker]) is not None
        return isinstance(action, Start) and not is_light(self._plan.arguments[action.part])

    def _go_on(self, _: object, __: object) -> None:
        self._is_left = False
        self._surroundings.run(self._act_alone, True)

    def _act_alone(self, may_block: bool = False) -> None:
        """Acts on a thread of the worker; an exception from the arguments' code ends the map."""
        while True:
            try:
                self._act(may_block)
                return
            except BaseException as error:
                if not self._give_up(error):
                    log_exception("the end of a map of %s could not be announced", self._plan.name)

    def _make(self, action: Make) -> None:
        peer = self._peers[action.worker]
        content = self._plan.content_for(peer)
        if content is None or self._schedule.is_over:
            return
        made_of = (content.payload, content.tensors, self._plan.manner.concurrency)
        try:
            if action.parent is None:
                made = create(self._worker, peer, shared.make, made_of, {}, 0.0)
            else:
                parent = self._object(action.parent)
                made = create(self._worker, peer, shared.pull, (parent,), {}, 0.0)
            self._objects[action.worker] = made
            self._orders[action.worker] = _Order()
        except Exception as error:  # The parts that need the object fail with this.
            self._objects[action.worker] = error

    def _object(self, worker: int) -> Handle | None:
        found = self._objects.get(worker)
        if isinstance(found, Exception):
            raise found
        return found

    def _start(self, action: Start) -> None:
        if not self._schedule.is_current(action.part, action.attempt):
            return  # The worker is lost, or the map is over.
        peer = self._peers[action.worker]
        key = action.part, action.attempt
        try:
            future = self._send(peer, action)
        except Exception as error:
            self._failed(*key, action.worker, error)
            return
        call = self._calls[key] = _Call(future, peer)
        if not action.is_ahead:
            self._note_begin(action.part, call)
        future.add_done_callback(partial(self._answered, *key, action.worker))

    def _begin(self, action: Begin) -> None:
        order = self._orders.get(action.worker)
        if order is not None:
            order.advance()
        with self._lock:  # The part's answer may arrive at the same time.
            call = self._calls.get((action.part, action.attempt))
            if call is not None:
                self._note_begin(action.part, call)

    def _note_begin(self, part: int, call: _Call) -> float:
        """Reports, once, that a part runs; returns when it began."""
        if call.begun_s is None:
            call.begun_s = time.monotonic()
            observers.tell("started", self._map_id, part, call.worker.name)
        return call.begun_s

    def _send(self, peer: Peer, action: Start) -> Future[Any]:
        if peer.lost is not None:
            raise peer.lost_error()
        made = self._object(action.worker)
        args, kwargs = self._plan.arguments[action.part]
        timeout = self._plan.manner.timeout
        if timeout > 0:
            timeout = max(self._end_s - time.monotonic(), _SHORTEST_S)
        if made is None:
            name = self._plan.name
            return start(self._worker, peer, self._plan.function, args, kwargs, timeout, name)
        order = self._orders[action.worker].next(action.is_ahead)
        part = (tuple(made.id), args, kwargs, *order)
        future = start(self._worker, peer, shared.run, part, {}, timeout, self._plan.name)
        future.kept = made
        return future

    def _cancel(self, action: Cancel) -> None:
        call = self._calls.pop((action.part, action.attempt), None)
        if call is not None:
            call.future.cancel()

    def _moved(self, action: Moved) -> None:
        from_worker, to_worker = self._peers[action.from_worker], self._peers[action.to_worker]
        observers.tell("moved", self._map_id, action.part, from_worker.name, to_worker.name)

    def _lost(self, action: Lost) -> None:
        peer = self._peers[action.worker]
        if action.parts:
            # Observers are told below; without any, the user should still see the loss.
            level = logging.INFO if observers.is_watched else logging.WARNING
            _log.log(
                level,
                "%s; in a map of %s, part(s) %s run again on others",
                peer.lost_error(),
                self._plan.name,
                ", ".join(map(str, action.parts)),
            )
        observers.tell("lost", self._map_id, peer.name, action.parts)

    def _complete(self, _: Complete) -> None:
        for mark in self._marks:
            device_streams.wait(mark)
        device_streams.keep(self._results)
        self._finish(self._results, None)

    def _fail(self, action: Fail) -> None:
        if action.worker is not None:
            self._error = self._plan.lost_error(self._peers[action.worker])
        self._finish(None, self._error)

    def _finish(self, results: list[Any] | None, error: BaseException | None) -> None:
        self._objects.clear()
        self._error, self._results = None, []
        on_done, self._on_done = self._on_done, None
        observers.tell("done", self._map_id, error)
        assert on_done is not None
        on_done(results, error)


_DO: dict[type[Action], Callable[[Execution, Any], None]] = {
    Make: Execution._make,
    Start: Execution._start,
    Begin: Execution._begin,
    Cancel: Execution._cancel,
    Moved: Execution._moved,
    Lost: Execution._lost,
    Complete: Execution._complete,
    Fail: Execution._fail,
}


# The ambient state of a thread, which a map restores on other threads


class Surroundings(NamedTuple):
    """The context variables of a thread, its grad mode and its GPU work.

    A map continues, and its reducer runs, on any thread that an answer arrives on. Among the
    variables are the autograd context, the served call, and those of the program, such as a span.
    """

    variables: Context
    context_id: int
    is_grad_enabled: bool
    mark: Mark | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether calls in this state become part of a graph."""
        return bool(self.context_id) and self.is_grad_enabled

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function in this state, on any thread; several threads may at a time."""
        device_streams.wait(self.mark)
        with torch.set_grad_enabled(self.is_grad_enabled):
            return self.variables.copy().run(function, *args)

    def for_this_call(self) -> Surroundings:
        """Returns the same state, but with the call that this thread serves."""
        variables = self.variables.copy()
        variables.run(current_call.set, current_call.get())
        return self._replace(variables=variables)


def surroundings() -> Surroundings:
    """Returns the ambient state of this thread."""
    mark = device_streams.mark() if device_streams.HAS_CUDA else None
    return Surroundings(copy_context(), current_id(), torch.is_grad_enabled(), mark)


# The map that runs, and its future


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
            with self._reactor.waiting(lambda: open_calls(self._calls())):
                while not self._over.wait(_LOOK_S):
                    if self._reactor.is_closing:  # The tasks that would end the map may never run.
                        self.cancel()
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

        def reduced(execution: Execution, results: list[Any]) -> Any:
            self._buffers.update(execution.changed)
            self._keep(results)
            if reducer is None:
                return list(results)
            self._agent.reactor.arm_all()  # The reducer may take long.
            return reduce(reducer, list(results), [part.weight for part in self._plan.parts])

        return self._run(reduced)

    def run_again(self) -> list[Any]:
        """Runs all parts again on the remaining workers, in the same autograd context. Blocks.

        Returns:
            The results in the order of the parts.

        Raises:
            WorkerLost: No worker is left, or the parts must not run twice.
            Exception: A part raised it.
        """
        future = self._surroundings.for_this_call().run(self._run, lambda _, results: results)
        try:
            found: list[Any] = future.wait()
        except BaseException:
            future.cancel()  # Ctrl-C: no thread waits for the results any more.
            raise
        return found

    def _run(self, finish: Callable[[Execution, list[Any]], Any]) -> MapFuture[Any]:
        """Begins to run all parts; the future has what ``finish`` makes of their results."""
        future: MapFuture[Any] = MapFuture(self._agent.reactor)

        def done(results: list[Any] | None, error: BaseException | None) -> None:
            if results is None:
                assert error is not None
                future.fail(error)
                return
            try:
                finished = finish(execution, results)
            except BaseException as failure:
                future.fail(failure)
            else:
                future.complete(finished)

        execution = Execution(self._plan, self._peers, self._worker, done)
        future.can_cancel(execution.cancel, execution.open_calls)
        execution.begin()
        return future

    def _keep(self, results: list[Any]) -> None:
        """Records the map in its context, so that a backward pass can run it again after a loss."""
        if self._surroundings.is_recorded and any(map(may_have_graph, results)):
            with contextlib.suppress(AutogradError):  # The program has left the context.
                context = self._worker.contexts.get(self._surroundings.context_id)
                context.maps.append(Results(results, self))
