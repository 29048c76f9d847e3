"""Provides the workers: started around this program, or by a launcher that runs it on each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torchweft as weft
from torchweft import rpc

SERVER = "server"


class UnusableGroup(ValueError):
    """The launcher has started too few or too many workers; the message is for the user."""


@contextmanager
def started_workers(trainers: int, on: str) -> Iterator[tuple[str, list[str]]]:
    """Starts a server and trainers for a ``with`` block; yields their names.

    Args:
        trainers: Number of workers that train.
        on: The launcher that starts them, and its options.
    """
    names = [f"trainer{number}" for number in range(trainers)]
    with weft.cluster(names=[SERVER, *names], on=on):
        yield SERVER, names


@contextmanager
def given_workers(trainers: int) -> Iterator[tuple[str, list[str]]]:
    """Uses the workers of the group, of which this one is the driver; yields their names.

    Args:
        trainers: Number of workers that train.

    Raises:
        UnusableGroup: The group does not have one worker more than driver and trainers.
    """
    infos = sorted(rpc.get_worker_infos(), key=lambda info: info.id)
    if len(infos) != trainers + 2:
        rpc.shutdown()
        raise UnusableGroup(
            f"{trainers} trainers, a server and the driver need {trainers + 2} workers, but the "
            f"launcher has started {len(infos)}"
        )
    _, server, *others = (info.name for info in infos)
    try:
        yield server, others
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    rpc.shutdown()


def joins_as_driver() -> bool:
    """Joins the group that a launcher has started; returns whether this process is the driver.

    Otherwise it first serves the driver until the group ends.
    """
    rpc.init_rpc()
    if rpc.get_worker_info().id == 0:
        return True
    rpc.shutdown()
    return False
