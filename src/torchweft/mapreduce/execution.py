"""Runs the parts of a map: carries out the schedule's actions, and reports events to it.

Events arrive on any thread. The schedule takes them under a lock, and its actions go to a queue.
One thread at a time executes the queue, outside the lock, so actions are executed in the order in
which they were decided; other threads only append. Most actions are fast. An action that may take
long, because it sends much, is left to a task: the thread that delivers an answer has other
answers to deliver.

All but ``cancel`` runs with the context variables and the grad mode of the code that called the
map: a callback of a future has those of the code that adds it, and tasks are given them.

An unexpected exception here ends the map, since a caller waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchweft import extending, rpc
from torchweft.autograd import in_context, recompute_after_loss
from torchweft.errors import CallCancelled, NotInitialized, WorkerLost
from torchweft.extending import Member
from torchweft.free_threading import shared_count
from torchweft.mapreduce import observers, shared, trees
from torchweft.mapreduce.buffers import Changed, Outcome
from torchweft.mapreduce.observers import tell
from torchweft.mapreduce.plan import Plan, is_light, may_have_graph
from torchweft.mapreduce.reducers import Reducer, reduce
from torchweft.mapreduce.schedule import (
    Action,
    Attempt,
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
from torchweft.mapreduce.shared import Shared
from torchweft.rpc import Future, OrderedFuture, RRef

OnDone = Callable[[list[Any] | None, BaseException | None], None]
"""Called with the results in the order of the parts, or with an error."""

_log = logging.getLogger("torchweft")

_SHORTEST_S = 1e-3
_map_ids = shared_count(1)


@dataclass(slots=True)
class _Call:
    """A part that was sent; a part sent ahead has not begun while its worker runs other parts."""

    future: Future[Any]
    worker: Member
    begun_s: float | None = None


class Execution:
    """One run of all parts of a map.

    Args:
        plan: The plan of the map.
        on_done: Called with the outcome, once, on any thread.
    """

    def __init__(self, plan: Plan, on_done: OnDone) -> None:
        self._plan = plan
        self._members = plan.members
        self._on_done: OnDone | None = on_done
        self._map_id = next(_map_ids)
        self._mark = extending.device_mark()
        self._end_s = time.monotonic() + plan.limit_s
        self._lock = threading.Lock()
        self._actions: deque[Action] = deque()
        self._is_acting = self._is_left = False
        self._objects: dict[int, RRef[Shared] | Exception] = {}
        self._calls: dict[Attempt, _Call] = {}
        """The calls of the attempts that have not ended."""
        self._results: list[Any] = [None] * len(plan.parts)
        self.changed: Sequence[Changed] = ()
        """The buffers of modules that the first part has changed."""
        self._marks: list[Callable[..., None]] = []  # of the threads that have put results there
        self._error: BaseException | None = None
        self._schedule = Schedule(
            [part[0] for part in plan.parts],
            plan.workers,
            concurrency=plan.manner.concurrency,
            balance=plan.manner.balance,
            may_rerun=plan.may_rerun,
            is_recorded=plan.context_id != 0,
            fan_out=plan.fan_out if plan.content is not None else 0,
            here=next((rank for rank, each in self._members.items() if each.is_self), None),
            keepers=[rank for rank, each in self._members.items() if plan.keeps_ahead(each)],
        )

    # Events

    def begin(self) -> None:
        """Sends the first parts. Blocks while it sends."""
        names = [self._members[rank].name for rank in self._plan.workers]
        tell("begun", self._map_id, self._plan.name, len(self._plan.parts), names)
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
        if not extending.is_worker():
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

    def _answered(self, part: int, attempt: int, worker: int, done: Future[Any]) -> None:
        try:
            self._mark()
            try:
                result = done.value()
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
        has_graph = self._plan.context_id != 0 and may_have_graph(result)
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
            self._marks.append(extending.device_mark())
            if call is not None:
                # Under the lock, or another thread might report the end of the map before this.
                seconds = time.monotonic() - self._note_begin(part, call)
                tell("ended", self._map_id, part, call.worker.name, seconds)
            self._actions += self._schedule.ended(part, attempt, has_graph)
            self._note_losses()

    def _failed(self, part: int, attempt: int, worker: int, error: BaseException) -> None:
        with self._lock:
            self._calls.pop((part, attempt), None)
            actions = self._schedule.failed(part, attempt, self._lost_by(worker, error))
            if Fail(None) in actions:
                self._error = self._plan.with_note(error, part, self._members[worker].name)
            self._actions += actions
            self._note_losses()

    def _lost_by(self, worker: int, error: BaseException) -> int | None:
        """Returns the worker of this map whose loss the error of a part reports, or None.

        A part may itself have called a lost worker, and raise that error; the schedule
        tells such a loss from a loss that affects the part.
        """
        if not isinstance(error, WorkerLost):
            return None
        named = [rank for rank, each in self._members.items() if each.name == error.worker]
        if named == [worker] and self._members[worker].lost is None:
            return None
        return named[0] if named else None

    def _note_losses(self, excepted: int | None = None) -> None:
        """Tells the schedule of workers that were lost meanwhile, whichever thread noticed."""
        for rank in self._schedule.workers:
            if rank != excepted and self._members[rank].lost is not None:
                self._actions += self._schedule.lost(rank)

    # Actions

    def _act(self, may_block: bool = False) -> None:
        """Executes queued actions, unless another thread does so already."""
        while (action := self._next(may_block)) is not None:
            try:
                _DO[type(action)](self, action)
            except Exception as error:
                self._end_with(error)
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
            here = copy_context(), torch.is_grad_enabled()
            extending.run_in_background(self._go_on, *here)
        return None

    def _takes_time(self, action: Action) -> bool:
        if self._schedule.is_over:
            return False
        if isinstance(action, Make):
            return self._plan.content_for(self._members[action.worker]) is not None
        return isinstance(action, Start) and not is_light(self._plan.arguments[action.part])

    def _go_on(self, variables: Any, is_grad_enabled: bool) -> None:
        self._is_left = False
        self._mark()
        with torch.set_grad_enabled(is_grad_enabled):
            variables.run(self._act_alone, True)

    def _act_alone(self, may_block: bool = False) -> None:
        """Acts on a thread of the worker; an exception from the arguments' code ends the map."""
        while True:
            try:
                self._act(may_block)
                return
            except BaseException as error:
                self._end_with(error)

    def _end_with(self, error: BaseException) -> None:
        if not self._give_up(error):
            extending.log_exception(
                "the end of a map of %s could not be announced", self._plan.name
            )

    def _make(self, action: Make) -> None:
        member = self._members[action.worker]
        content = self._plan.content_for(member)
        if content is None or self._schedule.is_over:
            return
        try:
            if action.parent is None:
                packed = content.payload, content.tensors, self._plan.manner.concurrency
                made = rpc.remote(member.info, shared.make, args=packed)
            else:
                parent = self._object(action.parent)
                made = rpc.remote(member.info, shared.pull, args=(parent,))
            self._objects[action.worker] = made
        except Exception as error:  # The parts that need the object fail with this.
            self._objects[action.worker] = error

    def _object(self, worker: int) -> RRef[Shared] | None:
        found = self._objects.get(worker)
        if isinstance(found, Exception):
            raise found
        return found

    def _start(self, action: Start) -> None:
        if not self._schedule.is_current(action.part, action.attempt):
            return  # The worker is lost, or the map is over.
        member = self._members[action.worker]
        try:
            future = self._send(member, action)
        except Exception as error:
            self._failed(action.part, action.attempt, action.worker, error)
            return
        call = self._calls[action.part, action.attempt] = _Call(future, member)
        if not action.is_ahead:
            self._note_begin(action.part, call)
        future.add_done_callback(partial(self._answered, *action[:3]))

    def _begin(self, action: Begin) -> None:
        with self._lock:  # The part's answer may arrive at the same time.
            call = self._calls.get((action.part, action.attempt))
            if call is not None:
                self._note_begin(action.part, call)

    def _note_begin(self, part: int, call: _Call) -> float:
        """Reports, once, that a part runs; returns when it began."""
        if call.begun_s is None:
            call.begun_s = time.monotonic()
            tell("started", self._map_id, part, call.worker.name)
        return call.begun_s

    def _send(self, member: Member, action: Start) -> Future[Any]:
        plan = self._plan
        function, args = plan.function, plan.arguments[action.part]
        timeout = plan.manner.timeout
        if timeout > 0:
            timeout = max(self._end_s - time.monotonic(), _SHORTEST_S)
        made = self._object(action.worker)
        if made is None:
            return extending.start_call(member, function, *args, timeout=timeout, name=plan.name)
        part = (tuple(made.id), *args, (action.part, action.attempt), action.after)
        future = extending.start_call(member, shared.run, part, timeout=timeout, name=plan.name)
        future.kept = made
        return future

    def _cancel(self, action: Cancel) -> None:
        call = self._calls.pop((action.part, action.attempt), None)
        if call is not None:
            call.future.cancel()

    def _moved(self, action: Moved) -> None:
        names = [self._members[rank].name for rank in (action.from_worker, action.to_worker)]
        tell("moved", self._map_id, action.part, *names)

    def _lost(self, action: Lost) -> None:
        member = self._members[action.worker]
        if action.parts:
            # Observers are told below; without any, the user should still see the loss.
            _log.log(
                logging.INFO if observers.watching else logging.WARNING,
                "%s; in a map of %s, part(s) %s run again on others",
                member.lost_error(),
                self._plan.name,
                ", ".join(map(str, action.parts)),
            )
        tell("lost", self._map_id, member.name, action.parts)

    def _complete(self, _: Complete) -> None:
        for mark in self._marks:
            mark(self._results)
        self._finish(self._results, None)

    def _fail(self, action: Fail) -> None:
        if action.worker is not None:
            self._error = self._plan.lost_error(self._members[action.worker])
        self._finish(None, self._error)

    def _finish(self, results: list[Any] | None, error: BaseException | None) -> None:
        self._objects.clear()
        self._error, self._results = None, []
        on_done, self._on_done = self._on_done, None
        tell("done", self._map_id, error)
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


# The map that runs, and its future


T = TypeVar("T")

_LOOK_S = 0.5
"""How often a waiting thread checks whether the worker has shut down."""


class MapFuture(OrderedFuture[T]):
    """The result of a map that may not be there yet.

    Works with ``then``, ``add_done_callback``, ``torch.futures.collect_all`` and ``wait_all``, and
    with ``await`` and ``asyncio.wait``.
    """

    __slots__ = ("_execution", "_over")

    def __init__(self) -> None:
        super().__init__()
        self._over = threading.Event()
        self._execution: Execution | None = None

    def begin(self, execution: Execution) -> None:
        """Begins the execution that completes it."""
        self._execution = execution
        execution.begin()

    def end(self, result: T | None, error: BaseException | None) -> None:
        """Completes it with a result, or with an error, of which each waiter raises a copy."""
        # Otherwise a reference cycle: the garbage collector cannot see futures.
        self._execution = None
        self._over.set()  # First: callbacks may take long.
        if error is None:
            self.set_result(result)  # type: ignore[arg-type]
        else:
            self.set_exception(error)

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until all parts have ended and their results are reduced; returns the result.

        A wait while serving a call does not keep this worker from serving other calls.

        Args:
            timeout: Seconds that this wait may take; by default those of the map. 0 to look only.

        Raises:
            CallTimeout: A part took too long; or the wait did, and the map goes on.
            WorkerLost: Workers were lost, and no worker is left to run the parts.
            ReduceError: The reducer failed.
            Exception: A part raised it.
        """
        if timeout is None and not self.done():
            with extending.waiting(self._waits):
                while not self._over.wait(_LOOK_S):
                    if not extending.is_worker():  # What would end the map may never run.
                        self.cancel()
        return super().wait(timeout)

    def _waits(self) -> Sequence[Any]:
        execution = self._execution
        return [] if execution is None else execution.open_calls()

    def cancel(self) -> bool:
        """Gives the map up: it fails with ``CallCancelled``, and running calls are cancelled.

        Returns:
            False if the map was over already.
        """
        execution = self._execution
        return execution is not None and execution.cancel()

    def __await__(self) -> Generator[Any, None, T]:
        return Future.__await__(self)  # type: ignore[arg-type]


def run_map(plan: Plan, reducer: Reducer | None) -> MapFuture[Any]:
    """Sends the first parts of a map, and returns the future of the reduced results."""

    def reduced(execution: Execution, results: list[Any]) -> Any:
        plan.buffers.update(execution.changed)
        tensors = _differentiable(results) if plan.context_id else []
        if tensors:
            recompute_after_loss(tensors, partial(_run_again, plan))
        if reducer is None:
            return list(results)
        extending.may_take_long()
        return reduce(reducer, list(results), [part.weight for part in plan.parts])

    return _run(plan, reduced)


def _run_again(plan: Plan) -> list[Tensor]:
    """Runs all parts again on the remaining workers, in the same autograd context. Blocks."""
    with in_context(plan.context_id), torch.enable_grad():
        future = _run(plan, lambda _, results: results)
    try:
        return _differentiable(future.wait())
    except BaseException:
        future.cancel()  # Ctrl-C: no thread waits for the results any more.
        raise


def _run(plan: Plan, finish: Callable[[Execution, list[Any]], Any]) -> MapFuture[Any]:
    """Begins to run all parts; the future has what ``finish`` makes of their results."""
    future: MapFuture[Any] = MapFuture()

    def done(results: list[Any] | None, error: BaseException | None) -> None:
        found = None
        try:
            if results is not None:
                found = finish(execution, results)
        except BaseException as failure:
            error = failure
        future.end(found, error)

    execution = Execution(plan, done)
    future.begin(execution)
    return future


def _differentiable(results: Sequence[Any]) -> list[Tensor]:
    leaves = trees.leaves(list(results))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
