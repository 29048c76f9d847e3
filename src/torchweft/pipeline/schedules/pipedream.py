"""Asynchronous schedules: the optimizer steps while other minibatches are under way (PipeDream).

A worker begins with a few forward passes and then runs forward and backward passes in turn, without
an end of the batch at which the pipeline would run empty. The gradients of a minibatch are applied
as soon as they are there, so later minibatches enter the pipeline with parameters that lack the
gradients of those under way; ``Weights`` has the rules for which version a minibatch uses.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torchweft.errors import ConfigurationError
from torchweft.pipeline.errors import ScheduleError
from torchweft.pipeline.schedules.synchronous import (
    Placement,
    Seat,
    checked_count,
    checked_replicas,
    seats_of,
)
from torchweft.pipeline.schedules.table import Action, Kind, Table, Weights, updates_of

Work = tuple[int, int]
"""A stage and a minibatch."""


class _EndlessRow(NamedTuple):
    """The endless row of one worker, in turns.

    A turn is one forward pass, the backward pass that follows it after the warm-up, and the update
    if that was the worker's last minibatch of the update.

    Attributes:
        seat: The worker's part.
        period: The number of minibatches for each update of its stage, a multiple of the replicas.
    """

    seat: Seat
    period: int

    def filling(self, first: int, end: int) -> Iterator[Action]:
        """Returns the turns of the minibatches from ``first`` to before ``end``.

        An update that takes in a minibatch from ``end`` on is left to the part after this one.
        """
        turns = range(self._turn_of(first), self._turn_of(end))
        for update in self._update_after(turns.start - 1 - self.seat.warm_up):
            if first <= update.microbatch < end:
                yield update
        for turn in turns:
            yield self._action(Kind.FORWARD, turn)
            yield from self._backward(turn - self.seat.warm_up, end)

    def draining(self, end: int) -> Iterator[Action]:
        """Returns the rest of the row when ``end`` minibatches have entered and no more will."""
        turn = self._turn_of(end)
        for earlier in range(turn - self.seat.warm_up, turn):
            yield from self._backward(earlier, end)
        if end % self.period:
            yield Action(self.seat.stage, Kind.UPDATE, end - 1)

    def newest_version(self, minibatch: int) -> int:
        """Returns how many updates come before the turn of a minibatch of any replica."""
        n_backward = minibatch // self.seat.n_replicas - self.seat.warm_up
        return max(0, n_backward // (self.period // self.seat.n_replicas))

    def _turn_of(self, minibatch: int) -> int:
        """Returns the turn of the worker's first minibatch from ``minibatch`` on."""
        return max(0, -(-(minibatch - self.seat.replica) // self.seat.n_replicas))

    def _action(self, kind: Kind, turn: int) -> Action:
        minibatch = self.seat.replica + turn * self.seat.n_replicas
        return Action(self.seat.stage, kind, minibatch)

    def _backward(self, turn: int, end: int) -> Iterator[Action]:
        """Returns the backward pass of a turn, and its update if all its minibatches entered."""
        if turn >= 0:
            yield self._action(Kind.BACKWARD, turn)
            for update in self._update_after(turn):
                if update.microbatch < end:
                    yield update

    def _update_after(self, turn: int) -> Iterator[Action]:
        """Returns the update that follows the backward pass of a turn, if one does."""
        if turn >= 0 and (turn + 1) % (self.period // self.seat.n_replicas) == 0:
            end = (turn + 1) * self.seat.n_replicas
            yield Action(self.seat.stage, Kind.UPDATE, end - 1)


@dataclass(frozen=True)
class SchedulePipeDream:
    """1F1B without end, with an optimizer step after every minibatch (Narayanan et al. 2019).

    ::

        step     0   1   2   3    4    5    6    7    8    9    10   11
        worker 0 0F0 0F1 0F2           0B0U 0F3  0B1U      0B2U      0B3U
        worker 1     1F0 1F1      1B0U 1F2  1B1U 1F3  1B2U      1B3U
        worker 2         2F0 2B0U 2F1  2B1U 2F2  2B2U 2F3  2B3U

    Training for a number of minibatches that is known runs ``table``. Otherwise it runs ``rows``
    part by part, each following the one before without a pause, and ``drain`` once at the end:
    together they are the table.

    A stage with ``r`` replicas is updated after each ``r`` minibatches, one of every replica. 2BW
    (Narayanan et al. 2021, memory-efficient pipeline-parallel training) updates after at least as
    many minibatches as are under way, so two versions of the parameters suffice.

    Args:
        n_minibatches: The number of minibatches of ``table``, if it is known.
        weights: The rule for versions of the parameters, or its name: ``"stashing"``,
            ``"vertical-sync"`` or ``"2bw"``.
        replicas: The number of workers for each stage, as ``(3, 1)``; one each if not given.
            Minibatch ``b`` goes to replica ``b mod r`` of a stage with ``r`` of them.
        accumulate: The number of minibatches for each update, the same for all stages. The default
            is the least that works. With stashing that is the number of replicas of the stage; with
            vertical sync, their least common multiple; with 2BW, a multiple of that which is at
            least the number of minibatches under way (on ``p`` workers without replicas, ``p``).

    Raises:
        ConfigurationError: An argument cannot work on any number of workers.
    """

    n_minibatches: int | None = None
    weights: Weights | str = Weights.STASHING
    replicas: tuple[int, ...] | None = None
    accumulate: int | None = None

    requires: ClassVar[str] = "a minibatch for each replica of a stage"

    def __post_init__(self) -> None:
        for name in ("n_minibatches", "accumulate"):
            if getattr(self, name) is not None:
                checked_count(name, getattr(self, name))
        names = [rule.value for rule in Weights]
        if not isinstance(self.weights, Weights) and self.weights not in names:
            raise ConfigurationError(f"weights is {self.weights!r}; pass one of {names}")
        object.__setattr__(self, "weights", Weights(self.weights))
        object.__setattr__(self, "replicas", checked_replicas(self.replicas))

    def placement(self, n_workers: int) -> Placement:
        """Returns the stage of each worker.

        Raises:
            ScheduleError: The replicas are more or fewer than the workers.
        """
        return tuple((seat.stage,) for seat in self._seats(n_workers))

    def table(self, n_workers: int, n_minibatches: int | None = None) -> Table:
        """Returns the whole table, with warm-up and drain.

        Args:
            n_workers: The number of workers.
            n_minibatches: The number of minibatches; by default the schedule's.

        Raises:
            ScheduleError: The schedule cannot have these numbers; the message names some that work.
            ConfigurationError: A number is less than 1, or the number of minibatches is missing.
        """
        end = self.n_minibatches if n_minibatches is None else n_minibatches
        if end is None:
            raise ConfigurationError(
                "the number of minibatches is not given; pass n_minibatches, or train for an "
                "unknown number with rows() and drain()"
            )
        most = max(seat.n_replicas for seat in self._seats(n_workers))
        if checked_count("n_minibatches", end) < most:
            fix = f"it requires {self.requires}; pass {most} or more"
            raise self._misfit(n_workers, f"{end} minibatches", fix, end)
        rows = tuple((*row.filling(0, end), *row.draining(end)) for row in self._rows(n_workers))
        n_stages = 1 + max(seat.stage for seat in self._seats(n_workers))
        return Table(type(self).__name__, n_stages, end, rows, Weights(self.weights))

    def rows(self, n_workers: int, first: int, count: int) -> tuple[tuple[Action, ...], ...]:
        """Returns the part of each worker's row in which some minibatches enter the pipeline.

        It has the forward passes of these minibatches, and the backward passes and updates that
        come between them, which are those of earlier ones for the most part. So the parts for
        minibatches 0 to 9 and 10 to 19, run one after the other, are the part for 0 to 19.

        Args:
            n_workers: The number of workers.
            first: The first of the minibatches.
            count: The number of them.

        Raises:
            ScheduleError: The schedule cannot have that many workers.
        """
        return tuple(tuple(row.filling(first, first + count)) for row in self._rows(n_workers))

    def drain(self, n_workers: int, n_minibatches: int) -> tuple[tuple[Action, ...], ...]:
        """Returns the end of each worker's row, after ``rows`` for all minibatches.

        Args:
            n_workers: The number of workers.
            n_minibatches: The number of minibatches that have entered.

        Raises:
            ScheduleError: The schedule cannot have that many workers.
        """
        return tuple(tuple(row.draining(n_minibatches)) for row in self._rows(n_workers))

    def version_used(self, stage: int, minibatch: int, n_workers: int) -> int:
        """Returns the version of a stage's parameters that a minibatch uses, forward and backward.

        The version is the number of updates that it contains. Without replicas and accumulation
        on ``p`` workers, minibatch ``b`` uses version ``max(0, b - (p - 1 - stage))`` with
        stashing, and ``max(0, b - (p - 1))`` with vertical sync. With 2BW it is
        ``max(0, b // m - 1)`` for ``m`` accumulated minibatches.

        Raises:
            ScheduleError: The schedule cannot have that many workers.
        """
        rows = {row.seat.stage: row for row in self._rows(n_workers)}
        if self.weights is Weights.DOUBLE_BUFFERED:
            return max(0, minibatch // rows[stage].period - 1)
        return rows[stage if self.weights is Weights.STASHING else 0].newest_version(minibatch)

    def _seats(self, n_workers: int) -> list[Seat]:
        checked_count("n_workers", n_workers)
        return seats_of(type(self).__name__, n_workers, self.replicas)

    def _rows(self, n_workers: int) -> list[_EndlessRow]:
        seats = self._seats(n_workers)
        together = math.lcm(*(seat.n_replicas for seat in seats))
        under_way = max(seat.n_replicas * (seat.warm_up + 1) for seat in seats)
        least = under_way if self.weights is Weights.DOUBLE_BUFFERED else 1
        period = -(-least // together) * together
        if self.accumulate is not None:
            if self.accumulate % together or self.accumulate < least:
                fix = f"pass a multiple of {together} that is at least {period}"
                raise self._misfit(n_workers, f"an update for {self.accumulate} minibatches", fix)
            period = self.accumulate
        elif self.weights is Weights.STASHING:
            return [_EndlessRow(seat, seat.n_replicas) for seat in seats]
        return [_EndlessRow(seat, period) for seat in seats]

    def _misfit(
        self, n_workers: int, what: str, fix: str, n_minibatches: int | None = None
    ) -> ScheduleError:
        rule = Weights(self.weights).value
        n_stages = len({stage for held in self.placement(n_workers) for stage in held})
        return ScheduleError(
            f"{type(self).__name__} ({rule}) on {n_workers} workers ({n_stages} stages) cannot "
            f"have {what}; {fix}",
            schedule=type(self).__name__,
            n_workers=n_workers,
            n_stages=n_stages,
            n_microbatches=n_minibatches,
        )


# Versions of the parameters: which minibatch uses which, how many live. The optimizer of a stage
# steps while other minibatches are between their forward and backward pass there. Each of them must
# end with the version that it began with, so the worker keeps that version (weight stashing).


class Versions(NamedTuple):
    """The versions of the parameters that a table uses.

    Attributes:
        used: The version that each (stage, minibatch) uses: how many updates it contains.
        newest: The newest version of the stage when the forward pass of (stage, minibatch) starts.
        held: For each worker, the most versions of one stage that it keeps at once: the newest one,
            and those of which a minibatch has yet to use, or to use for the last time.
    """

    used: Mapping[Work, int]
    newest: Mapping[Work, int]
    held: tuple[int, ...]


def versions_of(table: Table) -> Versions:
    """Returns the versions that a table uses, from its updates and its rule ``weights``.

    Args:
        table: A table; a synchronous one has only version 0.
    """
    newest = _newest(table)
    used = _used(table, newest)
    held = tuple(
        max((_held(row, stage, used) for stage in table.stages_of(worker)), default=0)
        for worker, row in enumerate(table.rows)
    )
    return Versions(used, newest, held)


def _newest(table: Table) -> dict[Work, int]:
    newest: dict[Work, int] = {}
    for row in table.rows:
        made: dict[int, int] = defaultdict(int)
        for stage, kind, microbatch in map(_parts, row):
            if kind is Kind.FORWARD:
                newest[stage, microbatch] = made[stage]
            elif kind is Kind.UPDATE:
                made[stage] += 1
    return newest


def _used(table: Table, newest: Mapping[Work, int]) -> Mapping[Work, int]:
    if table.weights is Weights.STASHING:
        return newest
    if table.weights is Weights.VERTICAL_SYNC:
        return {work: newest.get((0, work[1]), 0) for work in newest}
    updates = updates_of(table.rows)
    return {
        (stage, microbatch): max(0, bisect_left(updates[stage], microbatch) - 1)
        for stage, microbatch in newest
    }


def _held(row: Sequence[Action], stage: int, used: Mapping[Work, int]) -> int:
    """Returns the most versions of ``stage`` that a worker keeps at once.

    A version lives from the update that makes it to the one that replaces it, or until its last
    minibatch has ended. An update whose old version nobody needs writes over it.
    """
    made = [0]  # by version: the place in the row where it comes into being
    ends: dict[int, int] = defaultdict(int)  # by version: the place after its last use
    for place, (where, kind, microbatch) in enumerate(map(_parts, row)):
        if where == stage and kind is Kind.UPDATE:
            made.append(place)
        elif where == stage:
            version = used.get((stage, microbatch), 0)
            ends[version] = place + 1
    changes: dict[int, int] = defaultdict(int)
    for version, place in enumerate(made):
        replaced = made[version + 1] if version + 1 < len(made) else len(row)
        changes[place] += 1
        changes[max(replaced, ends[version])] -= 1
    held = peak = 0
    for place in sorted(changes):
        held += changes[place]
        peak = max(peak, held)
    return peak


def _parts(action: Action) -> tuple[int, Kind, int]:
    return action.stage, action.kind, action.microbatch
