"""The place of this process among the workers: rank, name, and number of workers.

The place is determined at each query. A process that has joined a group, in whichever way, asks
the group; before that, it reads the environment variables that its launcher has set.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from torchweft.agent.agent import Agent
from torchweft.agent.current import current, is_set
from torchweft.errors import ConfigurationError
from torchweft.ids import WorkerInfo
from torchweft.protocol.membership import HOST
from torchweft.rpc.joining import NAME_VARIABLE, get_worker_info


def default_worker_name_format(
    world_rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
) -> str:
    """Returns ``worker`` and the rank, with as many digits as the number of workers has."""
    return f"worker{world_rank:0{len(str(world_size))}d}"


class WorldInfo(NamedTuple):
    """The place of one worker in its group.

    Attributes:
        world_rank: Its number in the group, from 0.
        world_size: How many workers the group has; in an open group, how many it has now.
        local_rank: Its number among the workers of the same host, from 0.
        local_world_size: How many workers are on that host.
    """

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def rank(self) -> int:
        """The same as ``world_rank``."""
        return self.world_rank

    @property
    def worker_name(self) -> str:
        """The name of the worker; before this process joins, the default name.

        Raises:
            UnknownWorker: The group has no worker of this rank.
        """
        if is_set():
            return current().find(self.world_rank).name
        return launched_name() or default_worker_name_format(*self)


def get_world_info() -> WorldInfo:
    """Returns the place of this process among the workers. Never blocks.

    Before this process joins a group, the environment variables ``RANK``, ``WORLD_SIZE``,
    ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` define it; by default, the process is alone.

    Raises:
        ConfigurationError: One of the variables is not a number.
    """
    return _place_in_group(current()) if is_set() else launched_place()


def get_world_rank() -> int:
    """Returns the number of this worker in the group, from 0; see ``get_world_info``."""
    return current().info.id if is_set() else _number("RANK", 0)


get_rank = get_world_rank


def get_world_size() -> int:
    """Returns how many workers the group has; see ``get_world_info``."""
    return len(current().members.present()) if is_set() else _number("WORLD_SIZE", 1)


def get_local_rank() -> int:
    """Returns the number of this worker on its host, from 0; see ``get_world_info``."""
    return get_world_info().local_rank


def get_local_world_size() -> int:
    """Returns how many workers are on this host; see ``get_world_info``."""
    return get_world_info().local_world_size


def get_worker_id(id: str | int | WorkerInfo | None = None) -> int:
    """Returns the rank of a worker.

    Args:
        id: Its name or ``WorkerInfo``; None for this worker. A rank is returned as it is, whether
            or not there is such a worker.

    Raises:
        NotInitialized: ``id`` is a name, and this process has not joined a group.
        UnknownWorker: There is no such worker; lists the workers of the group.
    """
    if isinstance(id, int):
        return id
    return get_world_rank() if id is None else get_worker_info(id).id


def launched_place() -> WorldInfo:
    """Returns the place of this process according to the environment variables.

    Raises:
        ConfigurationError: A variable is not a number.
    """
    return WorldInfo(
        _number("RANK", 0),
        _number("WORLD_SIZE", 1),
        _number("LOCAL_RANK", 0),
        _number("LOCAL_WORLD_SIZE", 1),
    )


def launched_name() -> str | None:
    """Returns the name that ``torchweft run`` has given to this process, or None."""
    return os.environ.get(NAME_VARIABLE)


def _place_in_group(agent: Agent) -> WorldInfo:
    members = agent.members.present()
    rank, size = agent.info.id, len(members)
    place = launched_place()
    # A launcher knows best which worker is on which host, if it has started this group.
    if (place.world_rank, place.world_size) == (rank, size) and "LOCAL_RANK" in os.environ:
        return place
    host = agent.me.registration.facts.get(HOST)
    here = [peer.info.id for peer in members if peer.registration.facts.get(HOST) == host]
    return WorldInfo(rank, size, here.index(rank), len(here))


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if text is None:
        return default
    if not text.isdigit():
        raise ConfigurationError(
            f"environment variable {variable} is {text!r}, which is no number; unset it, or set it "
            f"like {variable}={default}"
        )
    return int(text)
