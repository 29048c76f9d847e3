"""The ids that travel: of workers, calls, references, contexts and messages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from torchweft.errors import ConfigurationError

_WORKER_NAME = re.compile("[A-Za-z0-9_:-]{1,127}")

WORKER_SHIFT = 48
"""Bits that a per-worker counter may use in an id that is unique for the whole group."""

ID_LIMIT = 1 << 15
"""The ids of workers are less, so that ids for the whole group fit into signed 64-bit integers."""


def scoped_id(worker: int, counter: int) -> int:
    """Makes an id that is unique in the group out of a counter that is unique on ``worker``."""
    return (worker << WORKER_SHIFT) | counter


def worker_of(scoped: int) -> int:
    """Returns the id of the worker that made ``scoped``."""
    return scoped >> WORKER_SHIFT


def check_worker_name(name: object) -> None:
    """Raises ConfigurationError for an invalid worker name."""
    if not isinstance(name, str) or not _WORKER_NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} is no name for a worker. Worker name must match [A-Za-z0-9_:-]*, "
            "must be non-empty and shorter than 128 characters"
        )


@dataclass(frozen=True, slots=True, repr=False)
class WorkerInfo:
    """Names one worker of the group.

    Attributes:
        name: The name that the worker passed to ``init_rpc``; unique in the group. At least one
            and fewer than 128 letters, digits, underscores, colons and dashes.
        id: Its rank, from 0.

    Raises:
        ConfigurationError: The name has other characters, or too many.
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        check_worker_name(self.name)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


class ReferenceId(NamedTuple):
    """Names one remotely referenced value.

    ``number`` counts, from 0 and without gaps, the values that ``creator`` asked ``owner`` to
    make; the owner can thus tell a value that is gone from one whose creation is still on the way.
    """

    creator: int
    owner: int
    number: int
