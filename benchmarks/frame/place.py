"""The parameters of a worker process, passed as one JSON argument."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Place:
    """A worker's place in the comparison.

    Attributes:
        folder: Package of the question.
        side: Name of the side.
        runner: How the side's processes connect: ``rpc``, ``raw``, ``alone``, ``forked`` or
            ``ranks``.
        api: ``torch``, ``weft`` or ``compat``.
        rank: Rank of the worker; worker 0 makes the calls.
        size: Number of workers in the group.
        cores: Cores on which the worker may run.
        address: Host of the rendezvous.
        port: Port of the rendezvous.
        options: Arguments of the backend's options class.
        cores_of_others: Cores of the workers that this process forks, from rank 1 on.
        descriptors: Inherited Unix sockets: the first worker has one to each other worker, in the
            order of their ranks; each other worker has one to the first.
    """

    folder: str
    side: str
    runner: str
    api: str
    rank: int
    size: int
    cores: list[int]
    address: str = "127.0.0.1"
    port: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    cores_of_others: list[list[int]] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Place:
        return cls(**json.loads(text))
