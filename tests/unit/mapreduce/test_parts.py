"""Tests triples with a weight, and the mark for values that are not cut."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from torchweft.mapreduce.parts import Broadcast, Part, bare, broadcast, kind_of, unwrap


def test_a_part_is_a_triple() -> None:
    part = Part(1, (2,), {"k": 3}, weight=4.0)
    worker, args, kwargs = part
    assert (worker, args, kwargs) == part == (1, (2,), {"k": 3})
    assert (len(part), isinstance(part, tuple), part.weight) == (3, True, 4.0)
    assert Part(0, (), {}).weight == 1.0


@pytest.mark.parametrize("travel", [copy.copy, lambda part: pickle.loads(pickle.dumps(part))])
def test_a_part_that_travelled_has_its_weight(travel) -> None:  # type: ignore[no-untyped-def]
    arrived = travel(Part(1, (2,), {"k": 3}, weight=4.0))
    assert type(arrived) is Part
    assert (tuple(arrived), arrived.weight) == ((1, (2,), {"k": 3}), 4.0)


def test_a_mark_holds_the_value_itself() -> None:
    value = {"w": torch.zeros(2)}
    assert broadcast(value).value is value
    assert repr(broadcast(value)) == "broadcast(dict)"


def test_marks_do_not_add_up() -> None:
    w = torch.zeros(2)
    assert broadcast(broadcast(w)).value is w
    assert broadcast({"w": broadcast(w)}).value == {"w": w}


def test_arguments_lose_their_marks_and_keep_all_else() -> None:
    w, others = torch.zeros(2), [torch.ones(1), {"deep": (1, 2)}]
    args, kwargs = unwrap((broadcast(w), others, {"w": [broadcast(w)]}), {"key": broadcast(w)})
    assert args[0] is args[2]["w"][0] is kwargs["key"] is w
    assert args[1] is others


def test_a_tree_without_marks_is_left_as_it_is() -> None:
    tree = (torch.zeros(2), [1, {"a": None}])
    assert bare(tree) is tree


def test_a_mark_can_be_pickled() -> None:
    arrived = pickle.loads(pickle.dumps(broadcast([1, 2])))
    assert type(arrived) is Broadcast
    assert arrived.value == [1, 2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (1, "an int"),
        ("text", "a str"),
        ([1, 2], "a list of 2"),
        ((), "a tuple of 0"),
        (torch.zeros(2, 3), "a Tensor of shape (2, 3)"),
    ],
)
def test_what_a_value_is(value: object, text: str) -> None:
    assert kind_of(value) == text
