"""The shapes of lookups, and batches with the frequencies of words."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


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
    """

    name: str
    title: str
    tables: int
    rows: int
    dim: int
    bags: int
    length: int

    @property
    def ids(self) -> int:
        """The ids of a batch, in all tables."""
        return self.tables * self.bags * self.length


SHAPES = (
    Shape("bags", "8 tables, bags of 10", 8, 100_000, 64, 512, 10),
    Shape("single", "26 tables, single ids", 26, 50_000, 32, 1024, 1),
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
