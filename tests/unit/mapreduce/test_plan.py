from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.tables import cases
from torchweft.mapreduce import plan
from torchweft.mapreduce.plan import find_common, is_light, is_worth_it, may_have_graph
from torchweft.mapreduce.shared import Slot, _filled


def shape(value: Any) -> Any:
    """Returns arguments with each slot replaced by a text with its number."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(shape, value))
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    return f"slot {value.number}" if isinstance(value, Slot) else value


def test_what_two_parts_hold_is_taken_out_of_all() -> None:
    model, tensor = nn.Linear(2, 2), torch.ones(3)
    arguments = [
        ((model, 1), {"x": tensor}),
        ((model, 2), {}),
        (("name", {"nested": [tensor]}), {}),
    ]
    common = find_common(arguments)
    assert common.values == [model, tensor]
    assert shape(common.arguments) == [
        (("slot 0", 1), {"x": "slot 1"}),
        (("slot 0", 2), {}),
        (("name", {"nested": ["slot 1"]}), {}),
    ]
    for each, expected in zip(common.arguments, arguments, strict=True):
        assert _filled(each, common.values) == expected


def test_what_is_equal_but_another_object_stays() -> None:
    arguments = [((torch.ones(3),), {}), ((torch.ones(3),), {})]
    assert find_common(arguments) == ([], arguments)


def test_what_one_part_holds_twice_stays() -> None:
    tensor = torch.ones(3)
    arguments = [((tensor, tensor), {}), ((), {})]
    assert find_common(arguments) == ([], arguments)


def test_a_container_is_one_thing() -> None:
    weights = {"a": torch.ones(2), "b": [torch.ones(2)]}
    common = find_common([((weights, row), {}) for row in range(3)])
    assert common.values == [weights]
    assert common.values[0] is weights
    assert shape(common.arguments) == [(("slot 0", row), {}) for row in range(3)]


def test_all_of_the_arguments_may_be_in_common() -> None:
    args, kwargs = (torch.ones(2),), {"x": torch.ones(2)}
    common = find_common([(args, kwargs), (args, kwargs)])
    assert shape(common.arguments) == [("slot 0", "slot 1")] * 2
    assert _filled(common.arguments[0], common.values) == (args, kwargs)


def test_what_must_stay_is_looked_into() -> None:
    model = nn.Linear(2, 2)
    held = [model, object()]
    common = find_common([((held,), {}), ((held,), {})], excluded={id(held), id(held[1])})
    assert common.values == [model]


@cases("value", [1, None, "text", b"bytes", torch.float32, len, nn.Linear, (), {}, [1, {"a": 2.0}]])
def test_what_is_not_worth_it(value: Any) -> None:
    assert not is_worth_it(value)
    assert find_common([((value,), {}), ((value,), {})]).values == []


@pytest.mark.parametrize("value", [torch.ones(1), nn.Linear(1, 1), [object()], lambda: 1])
def test_what_is(value: Any) -> None:
    assert is_worth_it(value)


def test_what_is_sent_in_no_time() -> None:
    small = torch.zeros(plan.LIGHT_BYTES // 4)
    assert is_light(((small, 1, "a", Slot(0)), {}))
    assert not is_light(((small, torch.zeros(1)), {}))
    assert not is_light(((nn.Linear(1, 1),), {}))


def test_into_what_gradients_may_lead() -> None:
    assert may_have_graph({"loss": torch.ones(1, requires_grad=True)})
    assert may_have_graph([object()]), "it cannot be seen"
    assert not may_have_graph((torch.ones(1), 3, None, "name"))
