"""Tests parameter groups as users write them, and the part that each owner gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.optim.references import reference
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.optim.distributed import split_groups
from torchweft.optim.local import GroupPart
from torchweft.optim.states import Group, by_owner, read_groups, read_references

A, B, C = (reference(owner, number) for owner, number in ((1, 0), (2, 0), (1, 1)))


def test_a_list_of_references_is_one_group() -> None:
    assert read_groups(iter([A, B])) == [Group({}, [A, B])]


def test_dicts_are_groups_and_may_hold_a_single_reference() -> None:
    given = [{"params": iter([A, B]), "lr": 0.1}, {"params": C}]
    assert read_groups(given) == [Group({"lr": 0.1}, [A, B]), Group({}, [C])]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "params_rref is empty"),
        ([{"params": []}], "group 0 is empty"),
        ([{"lr": 0.1}], 'group 0 has no "params"'),
        ([A, B, reference(1, 0)], "parameters 0 and 2 are the same"),
        ([{"params": [A]}, {"params": [B, A]}], "parameters 0 and 2 are the same"),
    ],
)
def test_values_that_cannot_work_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_groups(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [torch.ones(1)],
            r"parameter 0 of group 0 is a Tensor, not an RRef; pass torchweft.RRef\(",
        ),
        ([A, 3], r"parameter 1 of group 0 is an int.*remote_parameters\(\)"),
        ([{"params": [A]}, B], "mixes dicts with a"),
        (torch.ones(1), "params_rref is a Tensor; pass a list of RRefs"),
        (A, "pass a list of RRefs"),
        ({"params": [A]}, "pass a list of RRefs"),
    ],
)
def test_types_that_cannot_work_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        read_groups(given)


def test_plain_references_are_checked_in_the_same_way() -> None:
    assert read_references(iter([A, B])) == [A, B]
    assert read_references(A) == [A]  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="parameter 1 is a str"):
        read_references([A, "b"])
    with pytest.raises(ConfigurationError, match="parameters 0 and 1 are the same"):
        read_references([A, A])


def test_references_keep_their_positions() -> None:
    assert by_owner([A, B, C]) == {1: [(0, A), (2, C)], 2: [(1, B)]}


def test_every_owner_gets_its_part_of_each_group() -> None:
    groups = [Group({"lr": 0.1}, [A, B]), Group({}, [C])]
    assert split_groups(groups, first_group=3, first_number=10) == {
        1: [GroupPart(3, {"lr": 0.1}, [10], [A]), GroupPart(4, {}, [12], [C])],
        2: [GroupPart(3, {"lr": 0.1}, [11], [B])],
    }
