"""Tests the table of docs/protocols/mapreduce.md row by row, and the tree of objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from torchweft.mapreduce.schedule import (
    Begin,
    Cancel,
    Complete,
    Fail,
    Lost,
    Make,
    Moved,
    Schedule,
    Start,
)

A, B, C, D = 1, 2, 3, 4


def schedule(homes: Sequence[int], workers: Sequence[int] = (), **options: Any) -> Schedule:
    return Schedule(homes, workers or tuple(dict.fromkeys(homes)), **options)


def begun(homes: Sequence[int], workers: Sequence[int] = (), **options: Any) -> Schedule:
    made = schedule(homes, workers, **options)
    made.begin()
    return made


# begin


@pytest.mark.parametrize("fan_out", [1, 2, 3, 4, 7])
def test_a_tree_has_no_more_children_at_a_node_than_allowed(fan_out: int) -> None:
    workers = list(range(1, 30))
    made = [action for action in schedule(workers, fan_out=fan_out).begin() if type(action) is Make]
    assert [action.worker for action in made] == workers
    parents = [action.parent for action in made]
    assert max(parents.count(parent) for parent in parents) == fan_out
    known: set[int | None] = {None}
    for action in made:
        assert action.parent in known, "a parent comes first"
        known.add(action.worker)


def test_a_tree_is_as_flat_as_it_can_be() -> None:
    made = schedule([5, 6, 7, 8, 9, 10, 11], fan_out=2).begin()
    parents = {action.worker: action.parent for action in made if type(action) is Make}
    assert parents == {5: None, 6: None, 7: 5, 8: 5, 9: 6, 10: 6, 11: 7}


def test_the_caller_hangs_in_no_tree() -> None:
    made = schedule([0, 1, 2], fan_out=1, here=0).begin()
    parents = {action.worker: action.parent for action in made if type(action) is Make}
    assert parents == {0: None, 1: None, 2: 1}


# balance


def test_a_worker_with_nothing_to_do_takes_the_last_of_the_longest_queue() -> None:
    made = begun([A, A, A, B, C, C], balance=True)
    assert made.ended(3, 1, True) == [Moved(2, A, B), Start(2, 1, B)]
    assert made.ended(2, 1, True) == [Moved(1, A, B), Start(1, 1, B)]
    assert made.ended(1, 1, True) == [Moved(5, C, B), Start(5, 1, B)]
    assert made.ended(5, 1, True) == []


# ahead


def test_one_that_keeps_parts_is_sent_one_ahead() -> None:
    made = schedule([A, A, A, B], keepers={A, B})
    assert made.begin() == [
        Make(A, None),
        Start(0, 1, A),
        Start(1, 1, A, is_ahead=True, after=(0, 1)),
        Make(B, None),
        Start(3, 1, B),
    ]
    assert made.ended(0, 1, True) == [Begin(1, 1, A), Start(2, 1, A, is_ahead=True, after=(1, 1))]
    assert made.ended(1, 1, True) == [Begin(2, 1, A)]


def test_what_was_sent_ahead_is_taken_by_one_that_has_nothing_to_do() -> None:
    made = begun([A, A, B], keepers={A, B}, balance=True)
    assert made.ended(2, 1, True) == [Cancel(1, 1), Moved(1, A, B), Start(1, 2, B)]
    assert made.ended(1, 1, True) == [], "the answer of an old attempt"
    assert made.ended(0, 1, True) == []


# a part has failed


def test_the_error_of_a_part_ends_the_map_and_what_runs() -> None:
    made = begun([A, B, C, A])
    assert made.failed(1, 1) == [Cancel(0, 1), Cancel(1, 1), Cancel(2, 1), Fail(None)]
    assert made.ended(0, 1, True) == made.failed(2, 1) == made.lost(C) == made.give_up() == []


def test_the_loss_of_a_worker_that_the_part_itself_had_called() -> None:
    assert Fail(None) in begun([A, B]).failed(0, 1, lost=B)
    assert Fail(None) in begun([A, B]).failed(0, 1, lost=D)


# a worker is lost


def test_parts_below_it_run_on_where_no_graph_is_recorded() -> None:
    made = begun([A, B, B], fan_out=1)
    made.ended(0, 1, False)
    assert made.lost(A) == [Lost(A, ())]
    assert made.ended(1, 1, False) == [Make(B, None), Start(2, 1, B)]


@pytest.mark.parametrize("homes", [[A], [A, B], [A, A, B]])
def test_parts_that_must_not_run_twice(homes: list[int]) -> None:
    assert begun(homes, may_rerun=False).lost(A)[-1] == Fail(A)


def test_a_worker_whose_parts_are_done_may_go_where_parts_must_not_run_twice() -> None:
    made = begun([A, B], may_rerun=False)
    made.ended(0, 1, True)
    assert made.lost(A) == [Lost(A, ())]
    assert made.ended(1, 1, True) == [Complete()]
