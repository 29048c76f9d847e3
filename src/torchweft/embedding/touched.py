"""Measures which share of its rows a batch touches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchweft.arguments import did_you_mean
from torchweft.embedding.errors import PlanError
from torchweft.embedding.inputs import Checker
from torchweft.embedding.plan import TableConfig, check_names


def touched_shares(
    configs: Iterable[TableConfig], batches: Iterable[Mapping[str, Any]]
) -> dict[str, float]:
    """Returns the mean share of its rows that a batch touches, by table.

    Args:
        configs: The tables.
        batches: Batches of one trainer: by table, ids as for a lookup, or a tensor of ids of any
            shape. A table that a batch lacks is not touched by it. The padding of bags does not
            count.

    Raises:
        PlanError: There is no batch, or one names a table that there is not.
        BadIds: Ids are of a wrong type or shape.
        BadOffsets: Offsets do not begin at 0, do not rise, or go beyond the ids.
        IdOutOfRange: A table has no row for an id.
    """
    checkers = {config.name: Checker(config) for config in check_names(configs)}
    rows = dict.fromkeys(checkers, 0)
    count = 0
    for count, batch in enumerate(batches, start=1):  # noqa: B007  # counts
        for name, value in batch.items():
            ids = torch.unique(_ids(checkers, name, value))
            rows[name] += len(ids)
    if not count:
        raise PlanError("there is no batch to count rows in")
    # A dynamic table may be full before a batch is at its end.
    return {name: min(1.0, rows[name] / count / checkers[name].config.rows) for name in rows}


def _ids(checkers: Mapping[str, Checker], name: str, value: Any) -> Tensor:
    checker = checkers.get(name)
    if checker is None:
        hint = did_you_mean(name, list(checkers))
        raise PlanError(f"a batch names {name!r}, which is no table{hint}", table=name)
    if isinstance(value, Tensor) and not value.is_nested:
        value = value.reshape(-1, 1)  # of any shape
    return checker.flat(value).ids
