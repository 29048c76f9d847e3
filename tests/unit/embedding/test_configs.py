"""Tables and their places: values that cannot work, shards that cover a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchweft.embedding import (
    ColumnWise,
    Normal,
    PlanError,
    RowWise,
    Shard,
    Shards,
    TableConfig,
    TableWise,
)
from torchweft.embedding.configs import check_cover, check_names


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


TABLE = TableConfig("t", 7, 5)
ROWS, COLUMNS = range(7), range(5)


@pytest.mark.parametrize(
    "place",
    [
        RowWise("a"),
        RowWise("a", "b", "c"),
        RowWise(*"abcdefg"),
        ColumnWise("a", "b"),
        ColumnWise(*"abcde"),
        TableWise("a"),
    ],
    ids=str,
)
def test_every_way_to_cut_covers_each_value_once(place: Any) -> None:
    shards = place.shards(TABLE)
    check_cover(TABLE, shards)
    values = [(row, column) for shard in shards for row in shard.rows for column in shard.columns]
    assert sorted(values) == [(row, column) for row in ROWS for column in COLUMNS]


GRID = [
    Shard("a", range(0, 7, 2), range(2)),
    Shard("b", range(1, 7, 2), range(2)),
    Shard("c", ROWS, range(2, 5)),
]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([], "no shard has the columns 0-4"),
        (GRID[:2], "no shard has the columns 2-4"),
        (GRID[2:], "no shard has the columns 0-1"),
        ([GRID[0], GRID[2]], r"'a' has the rows range\(0, 7, 2\).*1 shards have range\(k, 7, 1\)"),
        ([GRID[0], GRID[0], GRID[2]], r"range\(0, 7, 2\) of the columns 0-1 is on 'a' and 'a'"),
        ([*GRID, Shard("d", ROWS, range(4, 5))], "the columns 4 are in shards that overlap"),
        ([Shard("a", ROWS, range(6))], "columns up to 5, and the table has 5"),
        ([Shard("a", range(8), COLUMNS)], r"has the rows range\(0, 8\)"),
        ([Shard("a", range(3), COLUMNS), Shard("b", range(3, 7), COLUMNS)], "rows range"),
        ([Shard("a", ROWS, range(0, 5, 2))], "use range"),
        ([GRID[0], GRID[1]._replace(server="a"), GRID[2]], "name each once"),
    ],
)
def test_shards_that_do_not_cover_the_table_are_refused(shards: Any, message: str) -> None:
    with pytest.raises(PlanError, match=f"table 't' cannot be cut so.*{message}") as caught:
        Shards(shards).shards(TABLE)
    assert caught.value.table == "t"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (RowWise(), "no server"),
        (RowWise(*"abcdefgh"), "it has 7 rows, too few for 8 servers"),
        (ColumnWise(*"abcdef"), "it has 5 columns, too few for 6 servers"),
        (RowWise("a", "a"), "name each once"),
        (RowWise(["a", "b"]), r"\['a', 'b'\] is named as a server; pass names"),  # type: ignore[arg-type]
        (ColumnWise(["a", "b"]), r"\['a', 'b'\] is named as a server"),  # type: ignore[arg-type]
        (TableWise(["a"]), r"\['a'\] is named as a server"),  # type: ignore[arg-type]
    ],
)
def test_servers_that_cannot_work_are_refused(place: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        place.shards(TABLE)
