from __future__ import annotations

from typing import Any

import pytest
import torch

from torchweft.embedding import (
    BadIds,
    ColumnWise,
    IdOutOfRange,
    Jagged,
    RowWise,
    TableConfig,
    TableWise,
)
from torchweft.embedding.inputs import Checker, Flat


def flat(value: Any, pooling: Any = "sum", **options: Any) -> Flat:
    config = TableConfig("t", 10, 4, pooling, **options)
    return Checker(config, TableWise("ps0").shards(config)).flat(value)


def parts(found: Flat) -> tuple[Any, Any, Any]:
    offsets = None if found.offsets is None else found.offsets.tolist()
    return found.ids.tolist(), offsets, found.lengths().tolist()


IDS = torch.tensor([5, 1, 5, 2])


@pytest.mark.parametrize(
    "value",
    [
        Jagged(IDS, torch.tensor([0, 1, 1])),
        (IDS.int(), torch.tensor([0, 1, 1], dtype=torch.int32)),
        Jagged(IDS, torch.tensor([0, 1, 1, 4]), include_last_offset=True),
        torch.nested.nested_tensor_from_jagged(IDS, torch.tensor([0, 1, 1, 4])),
    ],
)
def test_jagged_inputs_have_one_form(value: Any) -> None:
    found = flat(value)
    assert parts(found) == ([5, 1, 5, 2], [0, 1, 1], [1, 0, 3])
    assert found.numbers().tolist() == [0, 2, 2, 2]
    assert (found.bags, found.n_ids, found.shape) == (3, 4, (3,))


def test_a_nested_tensor_that_was_cut_out_of_a_padded_one_has_no_padding() -> None:
    padded = torch.tensor([[5, 9, 9], [9, 9, 9], [9, 1, 5]])
    starts, lengths = torch.tensor([0, 0, 1]), torch.tensor([1, 0, 2])
    value = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    assert parts(flat(value)) == ([5, 1, 5], [0, 1, 1], [1, 0, 2])


def test_offsets_that_were_made_in_inference_mode_serve_in_training() -> None:
    config = TableConfig("t", 10, 4, "sum")
    checker = Checker(config)
    with torch.inference_mode():
        checker.flat(IDS.view(2, 2))
    offsets = checker.flat(IDS.view(2, 2)).offsets
    assert offsets is not None
    assert not offsets.is_inference()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (IDS, "ids have 1 dimensions"),
        (Jagged(IDS.view(2, 2), torch.tensor([0, 2])), "with offsets they have one"),
        (Jagged(IDS, torch.tensor([[0, 2]])), "offsets have 2 dimensions"),
        (Jagged(IDS, torch.tensor([0.0, 2.0])), "offsets has torch.float32"),
        (
            Jagged(IDS, torch.tensor([0]), torch.ones(3)),
            r"weights of shape \[3\] do not",
        ),
        (Jagged(IDS, torch.tensor([0]), torch.ones(4).double()), "weights have torch.float64"),
        (IDS.bool()[None], "ids has torch.bool"),
        (
            IDS[None].to_sparse(),
            "ids has torch.int64 with the layout torch.sparse_coo; use a dense",
        ),
        (IDS[None].to("meta"), "ids has torch.int64 on meta; use a dense"),
        (Jagged([1, 2], torch.tensor([0])), "ids is a list"),  # type: ignore[arg-type]
        ((), "a tuple was passed"),
        (None, "a NoneType was passed"),
    ],
)
def test_other_inputs_are_refused(value: Any, message: str) -> None:
    with pytest.raises(
        BadIds, match=f"table 't' on ps0 cannot be looked up: .*{message}"
    ) as caught:
        flat(value)
    assert (caught.value.table, caught.value.server) == ("t", "ps0")


@pytest.mark.parametrize(
    ("place", "number", "server"),
    [
        (RowWise("a", "b", "c"), 10, "b"),
        (RowWise("a", "b", "c"), -1, "c"),
        (ColumnWise("a", "b"), 10, "a, b"),
        (TableWise("b"), 99, "b"),
    ],
)
def test_the_error_of_an_id_names_the_server_that_would_have_it(
    place: Any, number: int, server: str
) -> None:
    config = TableConfig("t", 10, 4)
    message = f"id {number} at position 1 is not in table 't' on {server}, which has the ids 0 to 9"
    with pytest.raises(IdOutOfRange, match=message) as caught:
        Checker(config, place.shards(config)).flat(torch.tensor([[3, number]]))
    error = caught.value
    assert (error.table, error.server, error.id, error.position) == ("t", server, number, 1)
