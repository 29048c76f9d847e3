"""What a worker process must know when it starts, handed over as one JSON argument."""

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
        runner: How the side's processes meet.
        api: ``torch`` or ``weft``.
        rank: Number of the worker; the first, 0, makes the calls.
        size: Workers of the group.
        cores: Where it may run.
        address: Host of the rendezvous.
        port: Port of the rendezvous.
        options: Arguments of the backend's options class.
        descriptors: Inherited Unix sockets: the first worker's to each other, in the order of
            their ranks; another's to the first.
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
    descriptors: list[int] = field(default_factory=list)

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Place:
        return cls(**json.loads(text))
