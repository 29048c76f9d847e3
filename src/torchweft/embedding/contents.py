"""Reads and writes all rows of a table, wherever its pieces are."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.arguments import kind_of
from torchweft.embedding import host
from torchweft.embedding.client import Client
from torchweft.embedding.errors import BadIds
from torchweft.embedding.pieces import Held, pieces_of
from torchweft.embedding.plan import Layout, TableConfig


def read(client: Client, layout: Layout, config: TableConfig) -> Tensor:
    """Returns a copy of a table on servers, ``(rows, dim)``. Blocks."""
    whole = torch.empty(config.rows, config.dim, dtype=config.dtype, device="cpu")
    for (_, server, rows, columns), stack, number in _pieces(layout, config):
        part = client.call(server, host.read, stack, number)
        whole[rows.start :: rows.step, columns.start : columns.stop] = part
    return whole


def write(client: Client, layout: Layout, config: TableConfig, values: Tensor) -> None:
    """Sets all rows of a table on servers. Blocks."""
    values = values.cpu()  # Servers keep rows in host memory.
    for (_, server, rows, columns), stack, number in _pieces(layout, config):
        part = values[rows.start :: rows.step, columns.start : columns.stop].contiguous()
        client.call(server, host.write, stack, number, part)


def check_values(layout: Layout, config: TableConfig, values: Tensor) -> None:
    """Checks values for all rows of a table.

    Raises:
        BadIds: They are no dense tensor, or have another shape or type than the table.
    """
    if not isinstance(values, Tensor) or values.layout is not torch.strided or values.is_meta:
        found = kind_of(values)
        if isinstance(values, Tensor):
            found = f"a tensor of {values.layout} on {values.device}"
        raise BadIds(
            f"table {config.name!r} was given {found}; pass a dense tensor of its values",
            table=config.name,
        )
    shape = (config.rows, config.dim)
    if tuple(values.shape) != shape or values.dtype != config.dtype:
        servers = ", ".join(dict.fromkeys(each.piece.server for each in _pieces(layout, config)))
        raise BadIds(
            f"table {config.name!r}{f' on {servers}' * bool(servers)} has {list(shape)} values of "
            f"{config.dtype}, and was given {list(values.shape)} of {values.dtype}",
            table=config.name,
            server=servers,
        )


def check_kind(config: TableConfig, *, is_dynamic: bool) -> None:
    """Checks that a table has dynamic ids, or has none.

    Raises:
        BadIds: It is of the other kind.
    """
    if is_dynamic and config.dynamic is None:
        raise BadIds(
            f"the ids of table {config.name!r} are numbers of rows; read it by weights()",
            table=config.name,
        )
    if not is_dynamic and config.dynamic is not None:
        raise BadIds(
            f"table {config.name!r} has dynamic ids, and so no rows of all ids; read those that it "
            "has by rows()",
            table=config.name,
        )


def _pieces(layout: Layout, config: TableConfig) -> list[Held]:
    return [each for each in pieces_of(layout) if each.piece.table == config.name]
