"""The rows that a group of trainers has pulled in its step. No I/O, no clock, no threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(eq=False)
class Batch:
    """Rows of one stack on one server, pulled by one message.

    Attributes:
        rows: The rows, each once, rising.
        values: Their values, in the form of messages; None while they are on their way.
        error: Why they will not come.
    """

    rows: Tensor
    values: Any = None
    error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether the rows are here, or will not come."""
        return self.values is not None or self.error is not None


class Part(NamedTuple):
    """Some of the rows of a request.

    Attributes:
        batch: The batch that has them.
        places: Their positions in the request.
        sources: Their positions in the batch.
    """

    batch: Batch
    places: Tensor
    sources: Tensor


def share(rows: Tensor, batches: list[Batch]) -> tuple[list[Part], Batch | None]:
    """Returns which batches have rows; those that none has become a new one in the list.

    Args:
        rows: Rows, each once, rising.
        batches: The batches of the stack in this step; changed.

    Returns:
        The parts, and the batch that is to be pulled, if there is one.
    """
    parts = []
    left = torch.arange(len(rows), device="cpu")
    for batch in batches:
        if not len(left) or not len(batch.rows):
            continue
        wanted = rows[left]
        sources = torch.searchsorted(batch.rows, wanted).clamp_(max=len(batch.rows) - 1)
        is_there = batch.rows[sources] == wanted
        if bool(is_there.any()):
            parts.append(Part(batch, left[is_there], sources[is_there]))
            left = left[~is_there]
    if not len(left):
        return parts, None
    new = Batch(rows if len(left) == len(rows) else rows[left])
    batches.append(new)
    parts.append(Part(new, left, torch.arange(len(left), device="cpu")))
    return parts, new


def gathered(parts: Sequence[Part], count: int) -> Any:
    """Returns copies of the values of a request, from parts that are here.

    Args:
        parts: The parts.
        count: Number of rows of the request.
    """
    if len(parts) == 1:
        # A copy: a trainer makes what it pulls a leaf of its graph.
        return _each(lambda values: values.index_select(0, parts[0].sources), parts[0].batch.values)

    def gather(*values: Tensor) -> Tensor:
        found = values[0].new_empty(count, *values[0].shape[1:])
        for part, own in zip(parts, values, strict=True):
            found[part.places] = own.index_select(0, part.sources)
        return found

    return _each(gather, *(part.batch.values for part in parts))


def _each(function: Any, *values: Any) -> Any:
    """Applies a function to payloads, which are tensors or tuples of these."""
    if isinstance(values[0], Tensor):
        return function(*values)
    return tuple(function(*own) for own in zip(*values, strict=True))
