"""Resolves names and ranks to workers.

Before this process joins a group, a rank is taken as it is, and a name cannot be resolved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from torchweft.agent.current import current, is_set
from torchweft.errors import ArgumentTypeError, ConfigurationError, UnknownWorker
from torchweft.ids import WorkerInfo
from torchweft.mapreduce.identity import launched_place
from torchweft.mapreduce.parts import kind_of
from torchweft.rpc import get_worker_info, get_worker_infos

Worker: TypeAlias = "int | str | WorkerInfo"


def is_worker(value: object) -> bool:
    """Whether a value can identify a worker: a rank, a name or a ``WorkerInfo``."""
    return isinstance(value, (int, str, WorkerInfo)) and not isinstance(value, bool)


def rank_of(worker: Any, where: str) -> int:
    """Returns the rank of a worker; ``where`` names the argument in error messages."""
    if not is_worker(worker):
        raise ArgumentTypeError(
            f"{where} is {kind_of(worker)}; pass the rank or the name of a worker"
        )
    if not is_set() and not isinstance(worker, str):
        return worker.id if isinstance(worker, WorkerInfo) else int(worker)
    try:
        return get_worker_info(worker).id
    except UnknownWorker as error:
        raise ConfigurationError(f"{where}: {error}") from error


def checked_workers(workers: Iterable[Worker], where: str) -> tuple[Worker, ...]:
    """Returns several workers; raises if there is none, or if an item is not a worker."""
    if isinstance(workers, (str, WorkerInfo)) or not isinstance(workers, Iterable):
        raise ArgumentTypeError(
            f"{where} is {kind_of(workers)}; pass a list, such as {where}=['worker0', 1]"
        )
    listed = tuple(workers)
    for position, worker in enumerate(listed):
        if not is_worker(worker):
            raise ArgumentTypeError(
                f"{where}[{position}] is {kind_of(worker)}; pass the ranks or names of workers"
            )
    if not listed:
        raise ConfigurationError(f"{where} is empty; name one at least, or pass None for all")
    return listed


def ranks_of(workers: tuple[Worker, ...], where: str) -> tuple[int, ...]:
    """Returns the ranks of several workers."""
    return tuple(rank_of(worker, f"{where}[{at}]") for at, worker in enumerate(workers))


def all_ranks() -> tuple[int, ...]:
    """Returns the ranks of all workers of the group."""
    if is_set():
        return tuple(info.id for info in get_worker_infos())
    return tuple(range(launched_place().world_size))


def without_lost(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ranks of workers that are not lost; all ranks if every worker is lost."""
    if not is_set():
        return ranks
    left = {peer.info.id for peer in current().members.present() if peer.lost is None}
    return tuple(rank for rank in ranks if rank in left) or ranks


def own_rank() -> int:
    """Returns the rank of this worker."""
    return get_worker_info().id if is_set() else launched_place().world_rank
