from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from torchweft.engine.wire.messages import NO_GRAD
from torchweft.errors import BatchError
from torchweft.rpc.stacking import (
    Entry,
    Options,
    Runner,
    kind_of,
    put_together,
    stack,
    take_apart,
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
    again = put_together(parts.structure, iter(parts.leaves))
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
    assert kind_of(parts[0], False) == kind_of(parts[1], False)
    columns = list(zip(*[each.leaves for each in parts], strict=True))
    joined = put_together(parts[1].structure, iter(stack(columns, None)))
    assert list(joined["x"]) == list(reversed(keys))
    for place, key in enumerate(keys):
        assert joined["x"][key].tolist() == [[place] * 2] * 2
    fewer = take_apart({"x": {key: values[key] for key in keys[1:]}})
    assert fewer.structure != parts[0].structure


def test_smaller_tensors_are_filled_up_at_the_end_of_each_dimension() -> None:
    (joined,) = stack([(torch.ones(1, 3), torch.ones(2, 1))], -1.0)
    assert joined.tolist() == [[[1, 1, 1], [-1, -1, -1]], [[1, -1, -1], [1, -1, -1]]]


def test_a_stack_requires_grad_if_a_part_does_and_leads_nowhere() -> None:
    (joined,) = stack([(torch.ones(2), torch.ones(2, requires_grad=True) * 2)], None)
    assert joined.requires_grad
    assert joined.is_leaf


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
    assert kind_of(one, False) == kind_of(take_apart((torch.zeros(2),)), False)
    assert kind_of(one, False) != kind_of(take_apart(other), False)


def test_with_padding_only_the_number_of_dimensions_counts() -> None:
    one, other, deeper = (take_apart((torch.ones(*size),)) for size in ((2,), (3,), (2, 1)))
    assert kind_of(one, True) == kind_of(other, True) != kind_of(deeper, True)


# Runs


class Call:
    """A call of worker ``peer``, which keeps its outcome."""

    context_id, owned = NO_GRAD, None

    def __init__(self, name: str) -> None:
        self.peer = SimpleNamespace(name=name, is_self=False)


def run(runner: Runner, *calls: Any) -> list[Any]:
    """Runs calls of workers ``0``, ``1``, ...; returns their results, or their errors."""
    entries = [
        Entry(Call(str(place)), (), take_apart((each,)), 0.0)  # type: ignore[arg-type]
        for place, each in enumerate(calls)
    ]
    return [error or result for result, error in runner.outcomes(entries)]


def test_a_result_is_split_into_rows() -> None:
    x = torch.tensor([1, 2])
    results = {"a": torch.tensor([[1, 2], [3, 4]]), "b": 9}
    rows = run(Runner(lambda _: results, "f", Options()), x, x)
    assert [row["a"].tolist() for row in rows] == [[1, 2], [3, 4]]
    assert [row["b"] for row in rows] == [9, 9]
    assert [row.item() for row in run(Runner(lambda _: x, "f", Options()), x, x)] == [1, 2]
    for result in (None, ()):
        assert run(Runner(lambda _: result, "f", Options()), x, x) == [result] * 2  # noqa: B023


@pytest.mark.parametrize("result", [torch.ones(3), torch.ones(()), (torch.ones(2), torch.ones(1))])
def test_a_result_without_a_row_for_each_call_is_refused(result: Any) -> None:
    for error in run(Runner(lambda _: result, "f", Options()), torch.ones(1), torch.ones(1)):
        assert isinstance(error, BatchError)
        assert "f was given a batch of 2 calls" in str(error)
        assert error.callers == ("0", "1")


def test_the_most_frequent_kind_wins_then_the_former_then_the_first() -> None:
    runner = Runner(lambda x: x, "f", Options())
    small, large = torch.ones(1), torch.ones(2)

    def is_run(*calls: Any) -> list[bool]:
        return [isinstance(each, torch.Tensor) for each in run(runner, *calls)]

    assert is_run(small, large, large) == [False, True, True]
    assert is_run(small, large) == [False, True]
    runner = Runner(lambda x: x, "f", Options())
    assert is_run(small, large) == [True, False]


def test_the_error_of_a_call_that_differs_names_caller_and_shapes() -> None:
    runner = Runner(lambda x: x, "f", Options())
    *_, error = run(runner, (torch.ones(2), 1), (torch.ones(2), 1), (torch.ones(3), 1))
    assert error.callers == ("2",)
    assert error.shapes == ("float32[3], 1 other",)
    assert "worker '2'" in str(error)
    assert "the others have float32[2], 1 other" in str(error)
