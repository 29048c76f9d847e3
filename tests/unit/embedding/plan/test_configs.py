from __future__ import annotations

from typing import Any

import pytest
import torch

from torchweft.embedding import Normal, PlanError, TableConfig
from torchweft.embedding.plan.configs import check_names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a.b"}, "without dots"),
        ({"name": ""}, "without dots"),
        ({"rows": 0}, "rows=0"),
        ({"dim": 2.0}, "dim=2.0"),
        ({"pooling": "avg"}, "use one of sum, mean, max, none"),
        ({"dtype": torch.int64}, "dtype=torch.int64"),
        ({"initial": 0.5}, "initial=0.5"),
        ({"padding_idx": 3}, "there are 3 rows"),
        ({"padding_idx": -4}, "there are 3 rows"),
        ({"padding_idx": "1"}, "padding_idx='1'; it is an integer"),
        ({"padding_idx": 1.0}, "padding_idx=1.0; it is an integer"),
        ({"initial": Normal("a")}, "its values are numbers"),  # type: ignore[arg-type]
    ],
)
def test_values_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        TableConfig(**{"name": "t", "rows": 3, "dim": 2, **options})


def test_padding_counts_from_the_end_as_in_pytorch() -> None:
    assert TableConfig("t", 3, 2, padding_idx=-1) == TableConfig("t", 3, 2, padding_idx=2)


def test_names_are_unique() -> None:
    table = TableConfig("t", 3, 2, dtype=torch.float64)
    assert (table.row_bytes, table.size_bytes) == (16, 48)
    assert check_names([table]) == (table,)
    for tables, message in [
        ([], "no table"),
        ([table, table], "two tables are named 't'"),
        (["t"], "a table is a str"),
    ]:
        with pytest.raises(PlanError, match=message):
            check_names(tables)  # type: ignore[arg-type]
