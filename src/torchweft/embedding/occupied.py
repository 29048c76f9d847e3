"""What workers ask servers about dynamic tables: functions that servers run, and their answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from torchweft.embedding.dynamic import DynamicShard, Occupancy
from torchweft.embedding.host import Host, host_of


def occupancy(name: str) -> dict[str, Occupancy]:
    """Returns how many ids of each dynamic table this server has."""
    host = host_of(name)
    with host.settled():
        return {shard.stack.members[0].config.name: shard.occupancy() for shard in _dynamic(host)}


def rows(name: str, table: str) -> list[tuple[Tensor, Tensor]]:
    """Returns the ids that have rows of a table on this server, and these rows, if it has any."""
    host = host_of(name)
    with host.settled():
        return [
            shard.rows() for shard in _dynamic(host) if shard.stack.members[0].config.name == table
        ]


CALLABLES = (occupancy, rows)


def _dynamic(host: Host) -> list[DynamicShard]:
    return [each for each in host.shards.values() if isinstance(each, DynamicShard)]


def joined_rows(answers: Iterable[list[tuple[Tensor, Tensor]]]) -> tuple[Tensor, Tensor]:
    """Returns the ids of all servers, rising, and their rows; at least one server has the table."""
    ids, values = (torch.cat(each) for each in zip(*itertools.chain(*answers), strict=True))
    ids, order = torch.sort(ids)
    return ids, values[order]


def joined_occupancy(answers: Iterable[Mapping[str, Occupancy]]) -> dict[str, Occupancy]:
    """Returns the sums over servers, by table."""
    found: dict[str, list[Occupancy]] = {}
    for by_table in answers:
        for name, own in by_table.items():
            found.setdefault(name, []).append(own)
    return {
        name: Occupancy(*(sum(each) for each in zip(*parts, strict=True)))
        for name, parts in found.items()
    }
