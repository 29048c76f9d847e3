"""Measures which share of its rows a batch touches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchweft.arguments import did_you_mean
from torchweft.embedding.errors import PlanError
from torchweft.embedding.inputs import Checker, Flat
from torchweft.embedding.plan import TableConfig, Touched, check_names


def touched_shares(
    configs: Iterable[TableConfig], batches: Iterable[Mapping[str, Any]]
) -> dict[str, Touched]:
    """Returns the mean share of its rows that a batch touches, by table; also of ids and bags.

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
    rows, ids, bags = (dict.fromkeys(checkers, 0) for _ in range(3))
    count = 0
    for count, batch in enumerate(batches, start=1):  # noqa: B007  # counts
        for name, value in batch.items():
            flat = _flat(checkers, name, value)
            rows[name] += len(torch.unique(flat.ids))
            ids[name] += flat.n_ids
            bags[name] += 0 if checkers[name].config.pooling == "none" else _bags(value, flat)
    if not count:
        raise PlanError("there is no batch to count rows in")
    return {
        # A dynamic table may be full before a batch is at its end.
        name: Touched(
            min(1.0, rows[name] / count / checkers[name].config.rows),
            ids[name] / count,
            bags[name] / count,
        )
        for name in rows
    }


def _bags(value: Any, flat: Flat) -> int:
    """Returns how many bags an input has; none if it has not the form of a lookup's."""
    is_plain = isinstance(value, Tensor) and not value.is_nested
    if is_plain:
        return value.shape[0] if value.dim() == 2 else 0
    return flat.bags


def _flat(checkers: Mapping[str, Checker], name: str, value: Any) -> Flat:
    checker = checkers.get(name)
    if checker is None:
        hint = did_you_mean(name, list(checkers))
        raise PlanError(f"a batch names {name!r}, which is no table{hint}", table=name)
    if isinstance(value, Tensor) and not value.is_nested:
        value = value.reshape(-1, 1)  # of any shape
    return checker.flat(value)
