"""The shapes of lookups, and batches with the frequencies of words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


BATCHES = 8
CHECKED_STEPS = 5
LR = 0.05


class Shape(NamedTuple):
    """Tables and the batches that are looked up in them.

    Attributes:
        name: Name of its works.
        title: Title in reports.
        tables: Number of tables.
        rows: Rows of a table.
        dim: Columns of a table.
        bags: Bags of a batch, in each table.
        length: Ids of a bag.
        pooling: ``sum``, or ``none`` for a row of output for each id.
        rule: The optimizer, of ``torch.optim`` and of ``torchweft.embedding``.
        operations: Operations of a round.
    """

    name: str
    title: str
    tables: int
    rows: int
    dim: int
    bags: int
    length: int
    pooling: Literal["sum", "none"] = "sum"
    rule: Literal["SGD", "Adagrad"] = "SGD"
    operations: int = 30

    @property
    def ids(self) -> int:
        """The ids of a batch, in all tables."""
        return self.tables * self.bags * self.length


# The numbers of bags can be divided by 2, 3 and 5, the numbers of torchrec's ranks.
SHAPES = (
    Shape("bags", "8 tables, 960 bags of 10", 8, 100_000, 64, 960, 10),
    Shape("single", "26 tables, 960 single ids", 26, 50_000, 32, 960, 1),
    Shape("rows", "8 tables, 480 x 10 ids, no pooling", 8, 100_000, 64, 480, 10, "none"),
    Shape(
        "large",
        "8 tables, 3,840 bags of 20, Adagrad",
        *(8, 100_000, 64, 3840, 20),
        rule="Adagrad",
        operations=10,
    ),
)


def draw(shape: Shape, number: int) -> list[Tensor]:
    """Returns ids ``(bags, length)`` of each table; the id r has a share of about 1 / r."""
    import torch

    generator = torch.Generator().manual_seed(number)
    size = (shape.tables, shape.bags, shape.length)
    draws = torch.rand(size, generator=generator, dtype=torch.float64)
    ids = (shape.rows**draws).long().sub_(1).clamp_(max=shape.rows - 1)
    return list(ids.unbind())


def initial_values(shape: Shape, table: int) -> Tensor:
    """Returns the values of a table, the same on both sides."""
    import torch

    numbers = torch.arange(shape.rows * shape.dim, dtype=torch.float32).view(-1, shape.dim)
    return torch.sin(numbers * 0.37 + table) * 0.1


def loss_of(outputs: Sequence[Tensor]) -> Tensor:
    """Returns a loss that costs little beside the lookups."""
    import torch

    return torch.stack([output.square().mean() for output in outputs]).sum()
