"""The nine synchronous schedules: one table for every batch, the optimizer steps after it.

A schedule writes the row of each worker from *phases*: "so many times these actions". The pictures
below have a row for each worker and a column for each time step; ``Table.text`` draws them.

Stages may be held by several workers (*replicas*), which are numbered by stage: the replicas of
stage 0 come first. Micro-batch ``b`` goes to replica ``b mod r`` of a stage with ``r`` replicas,
forward and backward (PipeDream, Narayanan et al. 2019).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torchweft.arguments import checked_int, wrong_type
from torchweft.errors import ConfigurationError
from torchweft.pipeline.errors import ScheduleError
from torchweft.pipeline.schedules.table import Action, Kind, Table

Placement = tuple[tuple[int, ...], ...]
"""For each worker the stages that it holds, in the order in which a micro-batch meets them."""
Work = tuple[int, int]
"""A stage and a micro-batch."""


def checked_count(name: str, value: Any) -> int:
    """Returns an argument that counts something.

    Raises:
        ArgumentTypeError: It is not an integer.
        ConfigurationError: It is less than 1.
    """
    count = checked_int(name, value)
    if count < 1:
        raise ConfigurationError(f"{name} is {count}; pass 1 or more")
    return count


# Phases


class Lane(NamedTuple):
    """The order in which a worker takes up forward and backward passes.

    Attributes:
        forward: The order of the forward passes.
        backward: The order of the backward passes, whole or of the input only.
    """

    forward: Sequence[Work]
    backward: Sequence[Work]


def in_order(stage: int, microbatches: Iterable[int]) -> Lane:
    """Returns the lane of one stage that takes up micro-batches in their order."""
    work = [(stage, microbatch) for microbatch in microbatches]
    return Lane(work, work)


class Phase(NamedTuple):
    """A part of a row that repeats.

    Attributes:
        times: The number of repetitions.
        pattern: Names of actions. ``F0``, ``B0`` and ``I0`` are the next forward pass, backward
            pass and input part of lane 0. ``W`` is the weight part of the oldest ``I`` that has
            none yet. A name is passed over once there is nothing left for it to do: so the last
            repetitions of ``F0 B0`` are backward passes only.
    """

    times: int
    pattern: str


def write_row(phases: Iterable[Phase], *lanes: Lane) -> tuple[Action, ...]:
    """Returns the row of the worker that goes through ``phases``."""
    queues: dict[str, deque[Work]] = {"W": deque()}
    for number, lane in enumerate(lanes):
        queues[f"F{number}"] = deque(lane.forward)
        queues[f"B{number}"] = queues[f"I{number}"] = deque(lane.backward)
    row: list[Action] = []
    for times, pattern in phases:
        names = pattern.split()
        for _ in range(times):
            for name in names:
                if not queues[name]:
                    continue
                stage, microbatch = work = queues[name].popleft()
                row.append(Action(stage, Kind(name[0]), microbatch))
                if name.startswith("I"):
                    queues["W"].append(work)
    return tuple(row)


def split_backward(lane: Lane, warm_up: int, delay: int) -> list[Phase]:
    """Returns the phases of 1F1B with split backward passes on one lane.

    Args:
        lane: The lane.
        warm_up: The number of forward passes before the first input part.
        delay: The number of input parts before the first weight part.
    """
    n_passes = len(lane.forward)
    return [
        Phase(min(warm_up, n_passes), "F0"),
        Phase(delay, "F0 I0"),
        Phase(n_passes, "F0 I0 W"),
        Phase(n_passes, "W"),
    ]


@dataclass(frozen=True)
class Schedule(ABC):
    """A synchronous schedule: one table for every batch, the optimizer steps after it.

    Args:
        n_microbatches: The number of micro-batches into which a batch is split.

    Raises:
        ConfigurationError: A number is less than 1.
    """

    n_microbatches: int

    requires: ClassVar[str] = "any number of micro-batches"
    """The condition on the number of micro-batches, where ``p`` is the number of workers."""

    def __post_init__(self) -> None:
        checked_count("n_microbatches", self.n_microbatches)

    def table(self, n_workers: int) -> Table:
        """Returns the schedule for a number of workers.

        Raises:
            ScheduleError: The schedule cannot have these numbers; the message names some that work.
            ConfigurationError: ``n_workers`` is less than 1.
        """
        placement = self.placement(n_workers)
        n_stages = 1 + max(stage for held in placement for stage in held)
        name, fix = type(self).__name__, self._fix(n_workers)
        if fix:
            raise ScheduleError(
                f"{name} on {n_workers} workers ({n_stages} stages) cannot have "
                f"{self.n_microbatches} micro-batches: it requires {self.requires}; {fix}",
                schedule=name,
                n_workers=n_workers,
                n_stages=n_stages,
                n_microbatches=self.n_microbatches,
            )
        rows = tuple(self._row(worker, n_workers) for worker in range(n_workers))
        return Table(name, n_stages, self.n_microbatches, rows)

    def placement(self, n_workers: int) -> Placement:
        """Returns the stages of each worker, in the order in which a micro-batch meets them.

        Raises:
            ConfigurationError: ``n_workers`` is less than 1, or no such number is possible.
        """
        checked_count("n_workers", n_workers)
        return tuple(self._stages(worker, n_workers) for worker in range(n_workers))

    def _stages(self, worker: int, n_workers: int) -> tuple[int, ...]:
        """Returns the stages of one worker."""
        return (worker,)

    def _fix(self, n_workers: int) -> str:
        """Returns advice if the schedule cannot have its number of micro-batches, else nothing."""
        return ""

    @abstractmethod
    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        """Returns the row of one worker."""


# One stage on each worker


@dataclass(frozen=True)
class ScheduleNaive(Schedule):
    """Takes one micro-batch at a time through all stages and back: one worker works at a time.

    Workers keep the activations of one micro-batch, and are idle for ``(p - 1) / p`` of the time::

        step     0   1   2   3   4   5   6   7   8   9   10  11
        worker 0 0F0                 0B0 0F1                 0B1
        worker 1     1F0         1B0         1F1         1B1
        worker 2         2F0 2B0                 2F1 2B1
    """

    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        lane = in_order(worker, range(self.n_microbatches))
        return write_row([Phase(self.n_microbatches, "F0 B0")], lane)


@dataclass(frozen=True)
class ScheduleZBH1(Schedule):
    """1F1B with split backward passes, whose weight parts fill idle time (ZB-H1, Qi et al. 2023).

    With a forward pass, an input part and a weight part of one length each, every worker is idle
    for ``p - 1`` of these lengths, a third of 1F1B's. Every worker keeps the activations of up to
    ``p`` micro-batches, as the first worker of 1F1B does::

        step     0   1   2   3   4   5   6   7   8   9   10  11  12  13
        worker 0 0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        worker 1     1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        worker 2         2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """

    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        lane = in_order(worker, range(self.n_microbatches))
        return write_row(split_backward(lane, n_workers - 1 - worker, worker), lane)


class Seat(NamedTuple):
    """The part of one worker in a pipeline in which every worker holds one stage.

    Attributes:
        stage: Its stage.
        replica: Which replica of the stage it is, counted from 0.
        n_replicas: The number of replicas of the stage.
        warm_up: The number of forward passes before its first backward pass in 1F1B.
    """

    stage: int
    replica: int
    n_replicas: int
    warm_up: int


def checked_replicas(replicas: Any) -> tuple[int, ...] | None:
    """Returns the argument ``replicas``.

    Raises:
        ArgumentTypeError: It is no sequence of integers.
        ConfigurationError: It is empty, or a number is less than 1.
    """
    if replicas is None:
        return None
    fix = "pass the number of workers for each stage, as (3, 1)"
    if not isinstance(replicas, (tuple, list)) or not all(type(r) is int for r in replicas):
        raise wrong_type("replicas", replicas, fix)
    if not replicas or min(replicas) < 1:
        raise ConfigurationError(f"replicas are {replicas!r}; {fix}, each 1 or more")
    return tuple(replicas)


def seats_of(schedule: str, n_workers: int, replicas: Sequence[int] | None) -> list[Seat]:
    """Returns the part of each worker.

    So that no worker need wait, the replicas of a stage together have as many micro-batches under
    way as there are workers from that stage on. Without replicas, stage ``s`` of ``p`` therefore
    begins with ``p - 1 - s`` forward passes.

    Args:
        schedule: The schedule's name, for the message.
        n_workers: The number of workers.
        replicas: The number of replicas of each stage; one each if it is None.

    Raises:
        ScheduleError: The replicas are more or fewer than the workers.
    """
    replicas = (1,) * n_workers if replicas is None else replicas
    if sum(replicas) != n_workers:
        raise ScheduleError(
            f"{schedule} on {n_workers} workers cannot have the replicas {replicas}, which are "
            f"{sum(replicas)} workers for {len(replicas)} stages; pass replicas whose sum is "
            f"{n_workers}, or {sum(replicas)} workers",
            schedule=schedule,
            n_workers=n_workers,
            n_stages=len(replicas),
        )
    found = []
    for stage, n_replicas in enumerate(replicas):
        under_way = -(-sum(replicas[stage:]) // n_replicas)
        found += [Seat(stage, replica, n_replicas, under_way - 1) for replica in range(n_replicas)]
    return found


@dataclass(frozen=True)
class _Replicated(Schedule):
    """A schedule in which several workers may hold one stage.

    Args:
        n_microbatches: The number of micro-batches into which a batch is split.
        replicas: The number of workers for each stage, as ``(3, 1)``; one each if not given.
            Micro-batch ``b`` goes to replica ``b mod r`` of a stage with ``r`` of them.

    Raises:
        ConfigurationError: A number is less than 1.
    """

    replicas: tuple[int, ...] | None = None

    requires: ClassVar[str] = "a micro-batch for each replica of a stage"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "replicas", checked_replicas(self.replicas))

    def _stages(self, worker: int, n_workers: int) -> tuple[int, ...]:
        return (self._seat(worker, n_workers).stage,)

    def _fix(self, n_workers: int) -> str:
        most = max(self.replicas or (1,))
        return f"pass {most} or more" if self.n_microbatches < most else ""

    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        seat = self._seat(worker, n_workers)
        microbatches = range(seat.replica, self.n_microbatches, seat.n_replicas)
        warm_up = self._warm_up(seat, len(microbatches))
        phases = [Phase(warm_up, "F0"), Phase(len(microbatches), "F0 B0")]
        return write_row(phases, in_order(seat.stage, microbatches))

    def _seat(self, worker: int, n_workers: int) -> Seat:
        return seats_of(type(self).__name__, n_workers, self.replicas)[worker]

    @abstractmethod
    def _warm_up(self, seat: Seat, n_own: int) -> int:
        """Returns the number of forward passes before the first backward pass.

        Args:
            seat: The worker's part.
            n_own: The number of its micro-batches.
        """


@dataclass(frozen=True)
class ScheduleGPipe(_Replicated):
    """All forward passes, then all backward passes (GPipe, Huang et al. 2019).

    The idle share is ``(p - 1) / (m + p - 1)`` for ``m`` micro-batches on ``p`` workers with stages
    of equal cost. Every worker keeps the activations of all ``m``::

        step     0   1   2   3   4   5   6   7   8   9   10  11
        worker 0 0F0 0F1 0F2 0F3                 0B0 0B1 0B2 0B3
        worker 1     1F0 1F1 1F2 1F3         1B0 1B1 1B2 1B3
        worker 2         2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
    """

    def _warm_up(self, seat: Seat, n_own: int) -> int:
        return n_own


@dataclass(frozen=True)
class Schedule1F1B(_Replicated):
    """Forward and backward passes in turn, after a few forward passes (Narayanan et al. 2019).

    The idle share is that of GPipe, ``(p - 1) / (m + p - 1)``; but worker ``w`` keeps at most
    ``p - w`` activations. Fewer micro-batches than workers work as well: then every worker that
    would begin with more forward passes than there are begins with all of them, as in GPipe::

        step     0   1   2   3   4   5   6   7   8   9   10  11
        worker 0 0F0 0F1 0F2         0B0 0F3 0B1     0B2     0B3
        worker 1     1F0 1F1     1B0 1F2 1B1 1F3 1B2     1B3
        worker 2         2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """

    def _warm_up(self, seat: Seat, n_own: int) -> int:
        return seat.warm_up


# Several stages on each worker, round and round: worker ``w`` of ``p`` holds ``w``, ``w + p``, and
# so on. With ``v`` stages for each worker a stage is short, so a worker waits a shorter time for
# its first micro-batch: the idle time is divided by ``v``, and ``v`` times as many messages are
# sent.


@dataclass(frozen=True)
class _Looped(Schedule):
    """A schedule with several stages for each worker.

    Args:
        n_microbatches: The number of micro-batches into which a batch is split.
        stages_per_worker: The number of stages for each worker.

    Raises:
        ConfigurationError: A number is less than 1.
    """

    stages_per_worker: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_count("stages_per_worker", self.stages_per_worker)

    def _stages(self, worker: int, n_workers: int) -> tuple[int, ...]:
        return tuple(worker + n_workers * turn for turn in range(self.stages_per_worker))

    def _lane(self, worker: int, n_workers: int, n_together: int) -> Lane:
        """Returns the order of a worker that takes ``n_together`` micro-batches to each stage."""
        stages = self._stages(worker, n_workers)
        starts = range(0, self.n_microbatches, n_together)

        def order(stages: tuple[int, ...]) -> list[Work]:
            return [
                (stage, start + place)
                for start in starts
                for stage in stages
                for place in range(n_together)
            ]

        return Lane(order(stages), order(stages[::-1]))


@dataclass(frozen=True)
class ScheduleLoopedBFS(_Looped):
    """All forward passes, stage by stage, then all backward passes (Lamy-Poirier 2022).

    A worker finishes all micro-batches of one of its stages before it takes up the next stage
    (breadth first). The idle time is that of interleaved 1F1B; every worker keeps the activations
    of all micro-batches of all of its stages::

        step     0   1   2   3   4   5   6   7   8   9   10  11  12  13
        worker 0 0F0 0F1 0F2 2F0 2F1 2F2         2B0 2B1 2B2 0B0 0B1 0B2
        worker 1     1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2
    """

    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        lane = self._lane(worker, n_workers, self.n_microbatches)
        n_passes = len(lane.forward)
        return write_row([Phase(n_passes, "F0"), Phase(n_passes, "B0")], lane)


@dataclass(frozen=True)
class _Interleaved(_Looped):
    """A schedule that takes micro-batches through the stages in rounds of ``p``, or a few more.

    A whole number of rounds of one size is enough, as in torch: 10 micro-batches on 4 workers are
    two rounds of 5. The known formula of the idle share holds for rounds of ``p``.
    """

    requires: ClassVar[str] = "a multiple of p, or at least of n_microbatches // p, micro-batches"

    def _fix(self, n_workers: int) -> str:
        fitting = [n for n in range(1, self.n_microbatches + n_workers + 1) if _fits(n, n_workers)]
        if self.n_microbatches in fitting:
            return ""
        fewer = max(n for n in fitting if n < self.n_microbatches)
        more = min(n for n in fitting if n > self.n_microbatches)
        return f"pass {fewer} or {more}"

    def _per_round(self, n_workers: int) -> int:
        return self.n_microbatches // max(1, self.n_microbatches // n_workers)


def _fits(n_microbatches: int, n_workers: int) -> bool:
    return n_microbatches % max(1, n_microbatches // n_workers) == 0


@dataclass(frozen=True)
class ScheduleInterleaved1F1B(_Interleaved):
    """1F1B with several stages for each worker (Narayanan et al. 2021, Megatron-LM).

    With ``v`` stages for each of ``p`` workers, the idle share is ``b / (m + b)`` for
    ``b = (p - 1) / v`` and ``m`` micro-batches::

        step     0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
        worker 0 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
        worker 1     1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """

    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        per_round = self._per_round(n_workers)
        lane = self._lane(worker, n_workers, per_round)
        n_passes = len(lane.forward)
        warm_up = (self.stages_per_worker - 1) * per_round + 2 * (n_workers - 1 - worker)
        return write_row([Phase(min(warm_up, n_passes), "F0"), Phase(n_passes, "F0 B0")], lane)


@dataclass(frozen=True)
class ScheduleInterleavedZeroBubble(_Interleaved):
    """Interleaved 1F1B with split backward passes (ZB1P of torch, after Qi et al. 2023).

    Weight parts fill idle time. With a forward pass, an input part and a weight part of one length
    each, every worker is idle for ``p - 1`` of these lengths. A worker keeps the activations of at
    most ``v * p`` passes, in rounds of ``p``::

        step     0   1   2   3   4   5   6   7   8   9   10  11  12
        worker 0 0F0 0F1 2F0 2F1     2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        worker 1     1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """

    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        per_round = self._per_round(n_workers)
        lane = self._lane(worker, n_workers, per_round)
        warm_up = (self.stages_per_worker - 1) * per_round + n_workers - 1 - worker
        return write_row(split_backward(lane, warm_up, delay=worker), lane)


# Two stages on each worker, in a V: worker ``w`` of ``p`` holds the stages ``w`` and
# ``2p - 1 - w``. A micro-batch goes down the workers and comes back up, so the first worker also
# has the last stage. It can begin with backward passes at once, and every worker keeps about as
# many activations as every other. Lane 0 is that of the stage ``w``, lane 1 that of ``2p - 1 - w``.


@dataclass(frozen=True)
class _VShaped(Schedule):
    requires: ClassVar[str] = "at least 2p micro-batches"

    def _stages(self, worker: int, n_workers: int) -> tuple[int, ...]:
        return worker, 2 * n_workers - 1 - worker

    def _fix(self, n_workers: int) -> str:
        least = 2 * n_workers
        return f"pass {least} or more" if self.n_microbatches < least else ""

    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        lanes = [
            in_order(stage, range(self.n_microbatches)) for stage in self._stages(worker, n_workers)
        ]
        return write_row(self._phases(worker, n_workers), *lanes)

    @abstractmethod
    def _phases(self, worker: int, n_workers: int) -> list[Phase]:
        """Returns the phases of one worker."""


@dataclass(frozen=True)
class ScheduleZBVZeroBubble(_VShaped):
    """Zero bubbles with the memory of 1F1B (ZB-V, Qi et al. 2024).

    With a forward pass, an input part and a weight part of one length each, a worker is idle only
    at both ends of the table, for ``p - 1`` of these lengths in all. Every worker keeps the
    activations of at most ``2p`` passes: as many bytes as the first worker of 1F1B, whose ``p``
    passes are of stages twice as long.

    The worker begins with forward passes, in lane 0 ahead by as many as run while a micro-batch
    goes down and comes back. Then it runs a forward pass, an input part and a weight part of each
    lane in turn. At the end weight parts are put off: other workers wait for the input parts. The
    begin, for two workers::

        step     0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16
        worker 0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1
        worker 1     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3
    """

    def _phases(self, worker: int, n_workers: int) -> list[Phase]:
        after = n_workers - worker
        return [
            Phase(2 * after - 1, "F0"),
            Phase(worker, "F1 F0"),
            Phase(after, "F1 I1 W"),
            Phase(self.n_microbatches - n_workers, "F0 I0 W F1 I1 W"),
            Phase(worker, "I0 I1"),
            Phase(after, "I0 W"),
            Phase(2 * worker, "W"),
        ]


@dataclass(frozen=True)
class ScheduleDualPipeV(_VShaped):
    """The V-shaped half of DualPipe (DeepSeek-V3 2024), in the eight phases of its authors.

    In the long phase every forward pass of a lane is followed by a backward pass of the other lane,
    of another micro-batch: the messages of each travel while the other is computed. Every worker
    keeps the activations of at most ``2p + 1`` passes. Backward passes are whole, except at both
    ends, where weight parts fill idle time::

        step     0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18
        worker 0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
        worker 1     1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """

    def _phases(self, worker: int, n_workers: int) -> list[Phase]:
        after = n_workers - 1 - worker
        pairs, odd = divmod(worker + 1, 2)
        return [
            Phase(2 * after, "F0"),
            Phase(worker + 1, "F0 F1"),
            Phase(after, "I1 W F1"),
            Phase(self.n_microbatches - 2 * n_workers + worker + 1, "F0 B1 F1 B0"),
            Phase(after, "B1 F1 B0"),
            Phase(pairs, "B1 B0"),
            Phase(odd, "B1 I0"),
            Phase(pairs, "I1 I0"),
            Phase(after, "W I0"),
            Phase(worker + 1, "W"),
        ]
