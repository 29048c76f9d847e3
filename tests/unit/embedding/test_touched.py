from __future__ import annotations

from typing import Any

import pytest
import torch

from torchweft.embedding import (
    BadIds,
    BadOffsets,
    IdOutOfRange,
    Jagged,
    PlanError,
    TableConfig,
    touched_shares,
)

WORDS = TableConfig("words", 10_000, 64, padding_idx=0)
DAYS = TableConfig("days", 8, 64, "none")


def test_shares_are_measured_in_batches() -> None:
    batches = [
        {"words": torch.tensor([[1, 1, 2]]), "days": torch.arange(8)},
        {"words": torch.tensor([5]), "days": torch.arange(4)},
    ]
    assert touched_shares([WORDS, DAYS], batches) == {"words": 1.5 / 10_000, "days": 0.75}


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


def test_tables_of_one_name_are_refused() -> None:
    with pytest.raises(PlanError, match="two tables are named 'days'"):
        touched_shares([DAYS, DAYS], [{}])
