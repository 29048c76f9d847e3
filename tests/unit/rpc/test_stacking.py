from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from torchweft.errors import BatchError
from torchweft.rpc.stacking import (
    are_alike,
    check_rows,
    differs,
    kind_of,
    put_together,
    rows_of,
    stack,
    take_apart,
    usual,
)


class Pair(NamedTuple):
    first: Any
    second: Any


VALUES = [
    torch.ones(2),
    (torch.ones(2), torch.zeros(3)),
    ([torch.ones(2), 5], {"a": torch.zeros(1), "b": (None, "text")}),
    Pair(torch.ones(1), [1, 2]),
    (),
    {},
    7,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_taken_apart_and_put_together(value: Any) -> None:
    parts = take_apart(value)
    again = put_together(parts.structure, parts.leaves)
    assert type(again) is type(value)
    assert take_apart(again).structure == parts.structure
    pairs = zip(parts.leaves, take_apart(again).leaves, strict=True)
    assert all(one is other for one, other in pairs)


@pytest.mark.parametrize("keys", [("a", "b", "c"), (3, "b", None)], ids=["alike", "mixed"])
def test_the_order_of_the_keys_of_a_dict_does_not_count(keys: tuple[Any, ...]) -> None:
    values = {key: torch.full((2,), float(place)) for place, key in enumerate(keys)}
    one, other = {"x": values}, {"x": dict(reversed(values.items()))}
    parts = [take_apart(each) for each in (one, other)]
    assert parts[0].structure == parts[1].structure
    assert hash(parts[0].structure) == hash(parts[1].structure)
    assert kind_of(parts[0], False) == kind_of(parts[1], False)
    assert are_alike(parts)
    columns = list(zip(*[each.leaves for each in parts], strict=True))
    joined = put_together(parts[1].structure, stack(columns, None))
    assert list(joined["x"]) == list(reversed(keys))
    for place, key in enumerate(keys):
        assert joined["x"][key].tolist() == [[place] * 2] * 2
    fewer = take_apart({"x": {key: values[key] for key in keys[1:]}})
    assert fewer.structure != parts[0].structure


def test_tensors_are_stacked_and_other_values_listed() -> None:
    tensors, numbers = stack([(torch.ones(2), torch.zeros(2)), (3, "x")], None)
    assert tensors.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert numbers == [3, "x"]


def test_smaller_tensors_are_filled_up_at_the_end_of_each_dimension() -> None:
    (joined,) = stack([(torch.ones(1, 3), torch.ones(2, 1))], -1.0)
    assert joined.tolist() == [[[1, 1, 1], [-1, -1, -1]], [[1, -1, -1], [1, -1, -1]]]


def test_a_stack_requires_grad_if_a_part_does_and_leads_nowhere() -> None:
    (joined,) = stack([(torch.ones(2), torch.ones(2, requires_grad=True) * 2)], None)
    assert joined.requires_grad
    assert joined.is_leaf


def test_a_result_is_split_into_rows() -> None:
    parts = take_apart({"a": torch.tensor([[1, 2], [3, 4]]), "b": 9})
    rows = rows_of(parts, 2)
    assert [row["a"].tolist() for row in rows] == [[1, 2], [3, 4]]
    assert [row["b"] for row in rows] == [9, 9]
    assert [row.item() for row in rows_of(take_apart(torch.tensor([5, 6])), 2)] == [5, 6]
    assert rows_of(take_apart(None), 2) == [None, None]
    assert rows_of(take_apart(()), 2) == [(), ()]


@pytest.mark.parametrize("result", [torch.ones(3), torch.ones(()), (torch.ones(2), torch.ones(1))])
def test_a_result_without_a_row_for_each_call_is_refused(result: Any) -> None:
    with pytest.raises(BatchError, match=r"f was given a batch of 2 calls.*'a', 'b'") as caught:
        check_rows(take_apart(result), 2, "f", lambda: ["a", "b"])
    assert caught.value.callers == ("a", "b")


@pytest.mark.parametrize(
    "other",
    [
        (torch.ones(3),),
        (torch.ones(2, dtype=torch.float64),),
        (torch.ones(2, device="meta"),),
        (torch.ones(2), torch.ones(2)),
        [torch.ones(2)],
        (5,),
    ],
)
def test_calls_that_differ_are_not_alike(other: Any) -> None:
    one = take_apart((torch.ones(2),))
    assert are_alike([one, take_apart((torch.zeros(2),))])
    for calls in ([one, take_apart(other)], [take_apart(other), one]):
        assert not are_alike(calls)
        assert kind_of(calls[0], False) != kind_of(calls[1], False)


def test_with_padding_only_the_number_of_dimensions_counts() -> None:
    one, other, deeper = (take_apart((torch.ones(*size),)) for size in ((2,), (3,), (2, 1)))
    assert kind_of(one, True) == kind_of(other, True) != kind_of(deeper, True)


def test_the_most_frequent_kind_wins_then_the_former_then_the_first() -> None:
    assert usual({"a": [0], "b": [1, 2]}, "a") == "b"
    assert usual({"a": [0], "b": [1]}, "b") == "b"
    assert usual({"a": [0], "b": [1]}, "c") == "a"


def test_the_error_of_a_call_that_differs_names_caller_and_shapes() -> None:
    error = differs("f", "w", take_apart((torch.ones(3), 1)), take_apart((torch.ones(2), 1)))
    assert error.callers == ("w",)
    assert error.shapes == ("float32[3], 1 other",)
    assert "worker 'w'" in str(error)
    assert "the others have float32[2], 1 other" in str(error)
