"""Where tables go, what a step of them sends, and which share of their rows batches touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchweft.embedding import (
    BadIds,
    BadOffsets,
    ColumnWise,
    Copies,
    IdOutOfRange,
    Jagged,
    PlanError,
    RowWise,
    TableConfig,
    TableWise,
    Touched,
    Wire,
    plan_tables,
    touched_shares,
)
from torchweft.errors import ArgumentTypeError

WORDS = TableConfig("words", 10_000, 64)
DAYS = TableConfig("days", 8, 64)
SERVERS = ["ps0", "ps1"]


@pytest.mark.parametrize("trainers", [2, 4, 16])
@pytest.mark.parametrize(
    ("touched", "is_copied"), [(0.001, False), (0.1, False), (0.5, True), (1.0, True)]
)
def test_sparse_tables_go_to_servers_and_dense_ones_become_copies(
    touched: float, is_copied: bool, trainers: int
) -> None:
    plan = plan_tables([WORDS], SERVERS, trainers=trainers, touched={"words": touched})
    placed = plan.placed["words"]
    assert placed.is_copied == is_copied
    assert placed.reason.startswith("dense: " if is_copied else "sparse: ")
    assert len(placed.shards) == (0 if is_copied else 2)


@pytest.mark.parametrize(
    ("place", "touched", "options", "expected"),
    [
        # Ids go to each server of a cut by column.
        (ColumnWise(*SERVERS), 0.01, {}, 3 * 100 * 2 * (2 * 4 + 256)),
        (RowWise(*SERVERS), 0.01, {"wire": Wire("fp16", "int8")}, 3 * 100 * (8 + 128 + 68)),
        # Of 3 trainers one is a server, with half of the rows or all of them.
        (RowWise(*SERVERS), 0.01, {"trainers": ["ps1", "a", "b"]}, 2.5 * 100 * 2 * 260),
        (TableWise("ps1"), 0.01, {"trainers": ["ps1", "a", "b"]}, 2 * 100 * 2 * 260),
        # Sums of 10 bags with 500 ids are fewer bytes than 100 rows, and more from two servers.
        (TableWise("ps0"), Touched(0.01, 500, 10), {}, 3 * (8 * 600 + 10 * (4 + 512))),
        (RowWise(*SERVERS), Touched(0.01, 500, 10), {}, 3 * (8 * 600 + 20 * (4 + 512))),
        (RowWise(*SERVERS), Touched(0.01, 500, 60), {}, 3 * 100 * 2 * 260),
    ],
)
def test_bytes_are_those_of_the_place_the_form_and_the_way(
    place: Any, touched: float, options: Any, expected: float
) -> None:
    given = {"trainers": 3, **options}
    plan = plan_tables(
        [WORDS], SERVERS, touched={"words": touched}, places={"words": place}, **given
    )
    assert plan.placed["words"].server_bytes == round(expected)
    assert plan.trainers == 3


def test_copies_have_a_limit_which_small_tables_use_first() -> None:
    shares = {"words": 1.0, "days": 1.0}
    limit = WORDS.size_bytes
    plan = plan_tables([WORDS, DAYS], SERVERS, trainers=2, touched=shares, copies_limit_bytes=limit)
    assert plan.copied == (DAYS,)
    assert plan.placed["words"].reason == "too large for copies"


def test_large_tables_are_cut_by_row_and_small_ones_go_whole_to_the_emptiest_server() -> None:
    tables = [TableConfig(f"t{rows}", rows, 4) for rows in (1000, 90, 80, 70, 60)]
    plan = plan_tables(tables, SERVERS)
    places = {name: placed.place for name, placed in plan.placed.items()}
    assert places["t1000"] == RowWise(*SERVERS)
    assert [places[f"t{rows}"] for rows in (90, 80, 70, 60)] == [
        TableWise("ps0"),
        TableWise("ps1"),
        TableWise("ps1"),
        TableWise("ps0"),
    ]
    assert plan_tables(tables, ["ps0"]).placed["t1000"].place == TableWise("ps0")


def test_the_plan_prints_as_a_table() -> None:
    shares = {"words": 0.019, "days": 1.0}
    places = {"cut": ColumnWise("ps1", "ps0")}
    tables = [WORDS, DAYS, TableConfig("cut", 100, 8)]
    plan = plan_tables(tables, SERVERS, trainers=2, touched=shares, places=places)
    assert str(plan) == (
        "table    rows  dim     size  place                touched  bytes/step"
        "  all-gather  reason\n"
        "words  10,000   64  2.56 MB  by row: ps0, ps1       1.90%     197,600"
        "     100,320  sparse: 198 kB of rows, 5.12 MB of an all-reduce\n"
        "days        8   64  2.05 kB  copies               100.00%       4,096"
        "       4,224  dense: 8.32 kB of rows, 4.1 kB of an all-reduce\n"
        "cut       100    8   3.2 kB  by column: ps1, ps0        ?           ?"
        "           ?  requested\n"
        "2 trainers; bytes of all of them, without headers"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"touched": {"wrods": 0.1}}, "touched names 'wrods'.*did you mean 'words'"),
        ({"touched": {"words": 1.1}}, "a share is from 0 to 1"),
        ({"places": {"days": Copies()}}, "places names 'days'"),
        ({"trainers": 0}, "trainers=0"),
        ({"touched": {"words": "0.1"}}, "touched has '0.1' for table 'words'"),
        ({"places": {"words": "ps0"}}, r"the place of table 'words' is 'ps0'; use RowWise"),
        ({"places": {"words": Copies}}, "the place of table 'words' is <class"),
        ({"servers": []}, "no server is named, so table 'words'"),
        ({"configs": WORDS}, "pass a list of TableConfig"),
    ],
)
def test_arguments_that_cannot_work_are_refused(options: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_tables(**{"configs": [WORDS], "servers": SERVERS, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": "ps0"}, "servers is 'ps0'; pass a list of names"),
        ({"servers": [0, 1]}, r"servers is \[0, 1\]; pass a list of names"),
        ({"trainers": "worker0"}, "trainers is 'worker0'; pass a list of names"),
        ({"trainers": 1.5}, "trainers is 1.5; pass a list of names"),
        ({"servers": iter(SERVERS)}, "servers is <list_iterator .*; pass a list of names"),
        ({"touched": [0.1]}, "touched is a list; pass a dict, such as touched={'words'"),
        ({"places": ["words"]}, "places is a list; pass a dict"),
        ({"wire": "fp16"}, "wire is 'fp16', a str; pass Wire"),
    ],
)
def test_arguments_of_wrong_types_are_named(options: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        plan_tables([WORDS], **{"servers": SERVERS, **options})


WORDS = TableConfig("words", 10_000, 64, padding_idx=0)
DAYS = TableConfig("days", 8, 64, "none")


@pytest.mark.parametrize(
    "bags",
    [
        Jagged(torch.tensor([7, 7, 3, 0, 9]), torch.tensor([0, 2, 2])),
        (torch.tensor([7, 7, 3, 0, 9]), torch.tensor([0, 2, 2])),
        Jagged(torch.tensor([[7, 7], [3, 9]])),
        torch.nested.nested_tensor(
            [torch.tensor([7, 7]), torch.tensor([3, 0, 9])], layout=torch.jagged
        ),
        torch.tensor([7, 3, 9, 0], dtype=torch.int32),
    ],
)
def test_all_inputs_of_a_lookup_are_counted_without_padding(bags: Any) -> None:
    # The second batch does not touch the words.
    found = touched_shares([WORDS, DAYS], [{"words": bags}, {"days": torch.arange(2)}])
    assert found == {"words": 1.5 / 10_000, "days": 1 / 8}


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([], PlanError, "no batch"),
        ([{"wrods": torch.arange(2)}], PlanError, "names 'wrods', .* did you mean 'words'"),
        ([{"days": torch.tensor([8])}], IdOutOfRange, "id 8 at position 0"),
        ([{"days": torch.rand(2)}], BadIds, "torch.float32"),
        ([{"words": "all"}], BadIds, "a str was passed"),
        ([{"words": Jagged(torch.arange(3), torch.tensor([0, 4]))}], BadOffsets, "the last is 4"),
    ],
)
def test_batches_that_cannot_be_looked_up_are_refused(
    batches: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        touched_shares([WORDS, DAYS], batches)
