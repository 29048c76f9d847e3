"""Stages that several workers hold: which worker has which micro-batches.

Workers are numbered by stage: the replicas of stage 0 come first. Micro-batch ``b`` goes to replica
``b mod r`` of a stage with ``r`` replicas, forward and backward (PipeDream, Narayanan et al. 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torchweft.arguments import wrong_type
from torchweft.errors import ConfigurationError
from torchweft.pipeline.schedules.errors import ScheduleError


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
