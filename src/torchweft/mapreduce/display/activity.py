"""Gathers what the maps of this process tell: what runs where, and what each worker has done."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torchweft.mapreduce.display.stragglers import Durations, Straggler


@dataclass
class WorkerShare:
    """What one worker did for the maps that were watched.

    Attributes:
        parts: Parts that it ran to their end.
        busy_s: Seconds that these took, as the caller saw it: with the way there and back.
        times_behind: How many of its parts were stragglers.
        is_lost: Whether it was lost, and nothing came from it since.
    """

    parts: int = 0
    busy_s: float = 0.0
    times_behind: int = 0
    is_lost: bool = False


class Loss(NamedTuple):
    """A worker was lost, and these parts of a map run again elsewhere."""

    worker: str
    parts: tuple[int, ...]


class MapView(NamedTuple):
    """How far one map is; ``running`` has, for each of its workers, how many parts run there."""

    name: str
    parts: int
    ended: int
    running: dict[str, int]
    lost: frozenset[str]


class ActivityView(NamedTuple):
    """All that was seen up to one moment; ``maps`` are those that run, or the last that did."""

    maps: tuple[MapView, ...]
    maps_begun: int
    parts: int
    moved: int
    rerun: int
    workers: dict[str, WorkerShare]
    stragglers: tuple[Straggler, ...]


@dataclass
class _Map:
    name: str
    parts: int
    workers: tuple[str, ...]
    lost_before: frozenset[str]
    lost: set[str] = field(default_factory=set)
    running: dict[int, tuple[str, float]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    behind: set[int] = field(default_factory=set)

    def view(self) -> MapView:
        running = Counter(worker for worker, _ in self.running.values())
        return MapView(
            self.name,
            self.parts,
            len(self.ended),
            {worker: running[worker] for worker in self.workers},
            frozenset(self.lost),
        )


class Activity:
    """An observer that remembers; its methods may be called from any thread.

    It is told by several threads, so "started" may come after the "ended" of the same part, and
    "ended" after the loss of the worker. Of maps that began earlier it knows nothing.

    Args:
        clock: Says the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._maps: dict[int, _Map] = {}
        self._latest: _Map | None = None
        self._workers: dict[str, WorkerShare] = {}
        self._durations = Durations()
        self._news: list[Loss | Straggler] = []
        self._maps_begun = 0
        self._moved = 0
        self._rerun = 0

    def begun(self, map_id: int, name: str, parts: int, workers: Sequence[str]) -> None:
        """A map of so many parts begins."""
        with self._lock:
            lost = frozenset(worker for worker in workers if self._share(worker).is_lost)
            self._latest = self._maps[map_id] = _Map(name, parts, tuple(workers), lost)
            self._maps_begun += 1

    def started(self, map_id: int, part: int, worker: str) -> None:
        """A part was sent to a worker."""
        with self._lock:
            seen = self._maps.get(map_id)
            if seen is not None and part not in seen.ended:
                seen.running[part] = (worker, self._clock())

    def ended(self, map_id: int, part: int, worker: str, seconds: float) -> None:
        """The result of a part came, so long after the part was sent."""
        with self._lock:
            seen = self._maps.get(map_id)
            if seen is None or part in seen.ended or worker in seen.lost:
                return
            seen.running.pop(part, None)
            seen.ended.add(part)
            share = self._share(worker)
            share.parts += 1
            share.busy_s += seconds
            if worker in seen.lost_before:
                share.is_lost = False  # somebody of that name has joined since
            self._judge(seen, part, worker, seconds)
            self._durations.add(seen.name, seconds)

    def moved(self, map_id: int, part: int, from_worker: str, to_worker: str) -> None:
        """A part that waited for one worker will go to another."""
        with self._lock:
            self._moved += 1

    def lost(self, map_id: int, worker: str, parts: Sequence[int]) -> None:
        """A worker was lost; these parts run again elsewhere."""
        with self._lock:
            seen = self._maps.get(map_id)
            if seen is None:
                return
            for part in parts:
                seen.running.pop(part, None)
            seen.ended.difference_update(parts)
            seen.behind.difference_update(parts)
            seen.lost.add(worker)
            self._rerun += len(parts)
            self._note_loss(seen, worker, tuple(parts))

    def done(self, map_id: int, error: BaseException | None) -> None:
        """A map is over."""
        with self._lock:
            seen = self._maps.pop(map_id, None)
            if seen is not None:
                seen.running.clear()  # after an error, what still runs is of no interest

    def stragglers(self) -> tuple[Straggler, ...]:
        """Returns the parts that are behind now, the slowest first."""
        with self._lock:
            return self._stragglers()

    def workers(self) -> dict[str, WorkerShare]:
        """Returns what each worker has done, by name; a copy."""
        with self._lock:
            return self._shares()

    def view(self) -> ActivityView:
        """Returns all that was seen up to now."""
        with self._lock:
            running = list(self._maps.values())
            if not running and self._latest is not None:
                running.append(self._latest)
            return ActivityView(
                tuple(seen.view() for seen in running),
                self._maps_begun,
                sum(share.parts for share in self._workers.values()),
                self._moved,
                self._rerun,
                self._shares(),
                self._stragglers(),
            )

    def take_news(self) -> list[Loss | Straggler]:
        """Returns losses, and parts that fell behind, since the last call: each one once."""
        with self._lock:
            self._stragglers()
            news, self._news = self._news, []
            return news

    def _share(self, worker: str) -> WorkerShare:
        return self._workers.setdefault(worker, WorkerShare())

    def _shares(self) -> dict[str, WorkerShare]:
        return {name: replace(share) for name, share in self._workers.items()}

    def _stragglers(self) -> tuple[Straggler, ...]:
        now = self._clock()
        judged = (
            self._judge(seen, part, worker, now - since)
            for seen in self._maps.values()
            for part, (worker, since) in seen.running.items()
        )
        found = [straggler for straggler in judged if straggler is not None]
        return tuple(sorted(found, key=lambda straggler: -straggler.seconds))

    def _judge(self, seen: _Map, part: int, worker: str, seconds: float) -> Straggler | None:
        straggler = self._durations.judge(worker, part, seen.name, seconds)
        if straggler is not None and part not in seen.behind:
            seen.behind.add(part)
            self._share(worker).times_behind += 1
            self._news.append(straggler)
        return straggler

    def _note_loss(self, seen: _Map, worker: str, parts: tuple[int, ...]) -> None:
        share = self._share(worker)
        # Maps that begin later may meet the same loss again, at each step of a long run.
        is_known = share.is_lost and (worker in seen.lost_before or not parts)
        share.is_lost = True
        if not is_known:
            self._news.append(Loss(worker, parts))
