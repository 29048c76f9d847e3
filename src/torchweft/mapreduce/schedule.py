"""Decides which part of a map runs where, and handles losses: events in, actions out.

See ``docs/protocols/mapreduce.md``. Rules of the file:

- A part is in one state at a time: in the queue of a worker, running, or done. Each start of a part
  is an *attempt*. Events about an attempt that is not the current one change nothing.
- A ``Shared`` object depends on the worker that it was copied from: its ``path`` is the workers
  between the caller and it. If a worker on the path is lost, results that were computed with the
  object have no gradients any more.
- A worker without an object gets one from the caller when its first part is started.
- A worker with an object is sent one part *ahead* of the parts that it runs, and keeps it until one
  of them has ended. So it need not wait for the caller in between. With ``balance`` that part may
  be taken away again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import NamedTuple


class Make(NamedTuple):
    """Make a ``Shared`` object on a worker: a copy of the parent's, or (None) of the caller's."""

    worker: int
    parent: int | None


Attempt = tuple[int, int]
"""The numbers of a part, and of the start of it."""


class Start(NamedTuple):
    """Send a part to a worker, which has its object by now.

    A part that is sent ahead has ``is_ahead``. It runs when another part has ended, but not before
    the attempt ``after`` has begun, as two threads may read two messages.
    """

    part: int
    attempt: int
    worker: int
    is_ahead: bool = False
    after: Attempt | None = None


class Begin(NamedTuple):
    """A part that was sent ahead now runs."""

    part: int
    attempt: int
    worker: int


class Cancel(NamedTuple):
    """Cancel an attempt; its result is not needed."""

    part: int
    attempt: int


class Moved(NamedTuple):
    """A part has moved to the queue of an idle worker."""

    part: int
    from_worker: int
    to_worker: int


class Lost(NamedTuple):
    """A worker was lost; these waiting, running or void parts were queued again."""

    worker: int
    parts: tuple[int, ...]


class Complete(NamedTuple):
    """All parts have results."""


class Fail(NamedTuple):
    """The map has failed: by the loss of a worker, or (None) by the error of a part."""

    worker: int | None


Action = Make | Start | Begin | Cancel | Moved | Lost | Complete | Fail


class _Run(NamedTuple):
    """An attempt that runs, or has succeeded."""

    attempt: int
    worker: int
    path: tuple[int, ...]
    has_graph: bool = False


class Schedule:
    """The state of one map. Each method takes an event and returns the resulting actions.

    Args:
        homes: For each part the worker that the partitioner gave it.
        workers: The workers that may run parts after a loss, or with ``balance``.
        concurrency: How many parts a worker runs at a time.
        balance: Whether an idle worker takes parts from the queues of other workers.
        may_rerun: Whether parts run again if a worker is lost.
        is_recorded: Whether results may have a graph on the worker that made them.
        fan_out: How many children a node of the tree has; 0 if the caller sends to all workers.
        here: The caller, if it may run parts: it is never part of a tree.
        keepers: The workers that can be sent a part ahead.
    """

    def __init__(
        self,
        homes: Sequence[int],
        workers: Sequence[int],
        *,
        concurrency: int = 1,
        balance: bool = False,
        may_rerun: bool = True,
        is_recorded: bool = False,
        fan_out: int = 0,
        here: int | None = None,
        keepers: Container[int] = (),
    ) -> None:
        self._concurrency = concurrency
        self._balance = balance
        self._may_rerun = may_rerun
        self._is_recorded = is_recorded
        self._fan_out = fan_out
        self._here = here
        self._keepers = keepers
        self._queues: dict[int, deque[int]] = {
            worker: deque() for worker in (*workers, *dict.fromkeys(homes))
        }
        for part, worker in enumerate(homes):
            self._queues[worker].append(part)
        self._loads = dict.fromkeys(self._queues, 0)
        self._kept: dict[int, deque[int]] = {worker: deque() for worker in self._queues}
        self._begun: dict[int, Attempt | None] = {}
        """The attempt that has begun last on each worker, with its present object."""
        self._attempts = [0] * len(homes)
        self._running: dict[int, _Run] = {}
        self._ended: dict[int, _Run] = {}
        self._paths: dict[int, tuple[int, ...]] = {}
        self._actions: list[Action] = []
        self.has_begun = False
        self.is_over = False

    # Events

    def begin(self) -> list[Action]:
        """The map begins. Report known losses before this event."""
        self.has_begun = True
        with_parts = [worker for worker, queue in self._queues.items() if queue]
        for worker, parent in _tree(with_parts, self._fan_out, self._here):
            self._make(worker, parent)
            self._feed(worker)
        self._feed_all()
        return self._taken()

    def ended(self, part: int, attempt: int, has_graph: bool) -> list[Action]:
        """A part has succeeded; ``has_graph`` says whether gradients lead to its worker."""
        if self.is_current(part, attempt):
            run = self._stop(part)
            self._ended[part] = run._replace(has_graph=has_graph and self._is_recorded)
            self._feed(run.worker, may_take=True)
            self._check_complete()
        return self._taken()

    def failed(self, part: int, attempt: int, lost: int | None = None) -> list[Action]:
        """A part has failed; ``lost`` is the worker whose loss the error reports, if any."""
        if not self.is_current(part, attempt):
            return []
        run = self._running[part]
        if lost == run.worker:
            return self.lost(lost)
        if lost in run.path and self._may_rerun:
            self._replant(part)
        else:
            self._fail(None)
        return self._taken()

    def lost(self, worker: int) -> list[Action]:
        """A worker was lost."""
        if self.is_over or worker not in self._queues:
            return []
        waiting = self._queues.pop(worker)
        self._kept[worker].clear()
        uprooted = {other for other, path in self._paths.items() if worker in path}
        for other in (worker, *uprooted):
            self._paths.pop(other, None)
        stopped = [part for part, run in self._running.items() if self._is_stopped(run, worker)]
        void = [part for part, run in self._ended.items() if run.has_graph and _of(run, worker)]
        again = sorted((*waiting, *stopped, *void))
        if again and not (self._may_rerun and self._queues):
            self._fail(worker)
            return self._taken()
        self._actions.append(Lost(worker, tuple(again)))
        for part in stopped:
            self._actions.append(Cancel(part, self._stop(part).attempt))
        for part in again:
            self._ended.pop(part, None)
            self._queues[self._least_busy()].append(part)
        self._feed_all()
        return self._taken()

    def give_up(self) -> list[Action]:
        """The caller gives up the map."""
        if not self.is_over:
            self._fail(None)
        return self._taken()

    # State

    def is_current(self, part: int, attempt: int) -> bool:
        """Whether an attempt is the current attempt of its part, and runs."""
        run = self._running.get(part)
        return not self.is_over and run is not None and run.attempt == attempt

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that are not lost."""
        return tuple(self._queues)

    def _is_stopped(self, run: _Run, lost: int) -> bool:
        """Whether a loss voids a running attempt."""
        return run.worker == lost or (self._is_recorded and lost in run.path)

    def _least_busy(self) -> int:
        return min(self._queues, key=lambda worker: self._loads[worker] + len(self._queues[worker]))

    # Transitions

    def _feed_all(self) -> None:
        """Starts all parts that can start; workers with parts of their own go first."""
        if self.is_over or not self.has_begun:
            return
        for may_take in (False, True):
            for worker in tuple(self._queues):
                self._feed(worker, may_take=may_take)
        self._check_complete()

    def _feed(self, worker: int, *, may_take: bool = False) -> None:
        queue = self._queues.get(worker)
        if queue is None:
            return
        ahead = 1 if worker in self._keepers else 0
        while True:
            is_busy = self._loads[worker] >= self._concurrency
            if not queue and not is_busy and may_take and self._balance:
                self._take_from_longest(worker)
            if not queue or (is_busy and self._loads[worker] >= self._concurrency + ahead):
                return
            self._start(queue.popleft(), worker)

    def _take_from_longest(self, worker: int) -> None:
        """Moves a waiting part, or else a part that was sent ahead, to the queue of a worker."""
        longest = max(self._queues, key=lambda other: len(self._queues[other]))
        if self._queues[longest]:
            part = self._queues[longest].pop()
        else:
            longest = max(self._queues, key=lambda other: len(self._kept[other]))
            if not self._kept[longest]:
                return
            part = self._kept[longest][-1]
            self._actions.append(Cancel(part, self._stop(part).attempt))
        self._queues[worker].append(part)
        self._actions.append(Moved(part, longest, worker))

    def _start(self, part: int, worker: int) -> None:
        if worker not in self._paths:
            self._make(worker, None)
        self._attempts[part] += 1
        attempt = self._attempts[part]
        self._running[part] = _Run(attempt, worker, self._paths[worker])
        self._loads[worker] += 1
        if self._loads[worker] > self._concurrency:
            self._kept[worker].append(part)
            start = Start(part, attempt, worker, is_ahead=True, after=self._begun[worker])
        else:
            self._begun[worker] = part, attempt
            start = Start(part, attempt, worker)
        self._actions.append(start)

    def _stop(self, part: int) -> _Run:
        run = self._running.pop(part)
        self._loads[run.worker] -= 1
        kept = self._kept[run.worker]
        if part in kept:
            kept.remove(part)
        elif kept:
            following = kept.popleft()
            self._begun[run.worker] = following, self._attempts[following]
            self._actions.append(Begin(following, self._attempts[following], run.worker))
        return run

    def _make(self, worker: int, parent: int | None) -> None:
        self._paths[worker] = () if parent is None else (*self._paths[parent], parent)
        self._begun[worker] = None
        self._actions.append(Make(worker, parent))

    def _replant(self, part: int) -> None:
        """Runs a part again on its worker: another worker on the path of its object was lost."""
        run = self._stop(part)
        if self._paths.get(run.worker) == run.path:
            del self._paths[run.worker]
        self._queues[run.worker].appendleft(part)
        self._feed(run.worker)

    def _check_complete(self) -> None:
        if not self.is_over and len(self._ended) == len(self._attempts):
            self.is_over = True
            self._actions.append(Complete())

    def _fail(self, worker: int | None) -> None:
        self.is_over = True
        for part, run in self._running.items():
            self._actions.append(Cancel(part, run.attempt))
        self._actions.append(Fail(worker))

    def _taken(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions


def _of(run: _Run, worker: int) -> bool:
    return worker == run.worker or worker in run.path


def _tree(workers: Sequence[int], fan_out: int, here: int | None) -> list[tuple[int, int | None]]:
    """Returns workers with their parents (None for the caller), parents first."""
    others = [worker for worker in workers if worker != here]
    alone: list[tuple[int, int | None]] = [(worker, None) for worker in workers if worker == here]
    if not fan_out:
        return alone + [(worker, None) for worker in others]
    return alone + [
        (worker, None if place < fan_out else others[place // fan_out - 1])
        for place, worker in enumerate(others)
    ]
