"""What servers and users of a collection tell observers, such as ``torchweft top``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from torchweft.embedding.dynamic import DynamicShard
from torchweft.embedding.pulled import Traffic
from torchweft.embedding.shard import Shard
from torchweft.embedding.steps import Steps
from torchweft.engine.protocol.observing import NumberRow, NumberTable

LOOKUPS = "embedding lookups"
SERVERS = "embedding servers"


class Served(Protocol):
    """The shards of a collection on a server."""

    @property
    def shards(self) -> Mapping[int, Shard]:
        """The shards, by stack."""

    @property
    def steps(self) -> Steps[Any]:
        """The steps of the trainers."""


class Moving(Protocol):
    """The lookups of a worker."""

    def traffic(self) -> dict[str, Traffic]:
        """Returns what they have moved."""


def of_lookups(name: str, find: Callable[[], Moving | None]) -> NumberTable:
    """Returns what the lookups of a collection have moved, a row for each table."""
    found = find()
    rows = [] if found is None else [_row(name, *each) for each in found.traffic().items()]
    return NumberTable(LOOKUPS, ("collection", "table"), tuple(rows))


def _row(name: str, table: str, moved: Traffic) -> NumberRow:
    numbers = {
        "ids": float(moved.ids),
        "rows": float(moved.rows),
        "unique share": moved.rows / moved.ids if moved.ids else math.nan,
        "hits share": moved.hits / moved.rows if moved.rows else math.nan,
        "pulled bytes": float(moved.pulled_bytes),
        "pushed bytes": float(moved.pushed_bytes),
    }
    known = {key: value for key, value in numbers.items() if not math.isnan(value)}
    return NumberRow((name, table), known, {"staleness": _counts(moved.staleness)})


def of_server(name: str, find: Callable[[], Served | None]) -> NumberTable:
    """Returns what a server holds of a collection: the rows that it uses, and their memory."""
    host = find()
    if host is None:
        return NumberTable(SERVERS, ("collection",), ())
    rows, memory_bytes = 0, 0
    for shard in host.shards.values():
        rows += shard.used_rows if isinstance(shard, DynamicShard) else len(shard.weights)
        memory_bytes += sum(map(_size, (shard.weights, shard.changed, *shard.state.values())))
    numbers = {
        "rows": float(rows),
        "memory bytes": float(memory_bytes),
        "version": float(host.steps.version),
    }
    row = NumberRow((name,), numbers, {"staleness": _counts(host.steps.staleness)})
    return NumberTable(SERVERS, ("collection",), (row,))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _counts(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(dict(counts).items())}
