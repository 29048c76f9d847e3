from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchweft.embedding import ColumnWise, Constant, Normal, RowWise, TableConfig, Uniform
from torchweft.embedding.initial import fill


def filled(config: TableConfig, rows: range, columns: range, seed: int = 0) -> Tensor:
    target = torch.full((len(rows), len(columns)), torch.nan, dtype=config.dtype)
    fill(target, config, rows, columns, seed)
    return target


def whole(config: TableConfig, seed: int = 0) -> Tensor:
    return filled(config, range(config.rows), range(config.dim), seed)


@pytest.mark.parametrize("place", [RowWise("a", "b", "c"), ColumnWise("a", "b")])
def test_values_do_not_depend_on_how_a_table_is_cut(place: Any) -> None:
    config = TableConfig("t", 5000, 70, dtype=torch.float64, padding_idx=7)
    expected = whole(config)
    for _, rows, columns in place.shards(config):
        part = expected[rows.start :: rows.step, columns.start : columns.stop]
        assert torch.equal(filled(config, rows, columns), part)


def test_values_have_the_distribution() -> None:
    normal = whole(TableConfig("t", 10_000, 16, initial=Normal(1.0, 2.0)))
    assert normal.mean().item() == pytest.approx(1.0, abs=0.03)
    assert normal.std().item() == pytest.approx(2.0, abs=0.03)
    tail = ((normal - 1).abs() > 4).double().mean().item()
    assert tail == pytest.approx(0.0455, abs=0.003)
    uniform = whole(TableConfig("t", 10_000, 16, initial=Uniform(-1, 3)))
    assert uniform.min() >= -1
    assert uniform.max() < 3
    counts = torch.histc(uniform, 20, -1, 3) / uniform.numel()
    assert counts.tolist() == pytest.approx([0.05] * 20, abs=0.003)
    assert torch.equal(whole(TableConfig("t", 2, 2, initial=Constant(5))), torch.full((2, 2), 5.0))
