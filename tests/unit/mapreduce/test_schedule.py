"""Tests the table of docs/protocols/mapreduce.md row by row, and the tree of objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from torchweft.mapreduce.schedule import (
    Action,
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


def starts(actions: Sequence[Action]) -> list[tuple[int, int]]:
    return [(action.part, action.worker) for action in actions if isinstance(action, Start)]


# begin


def test_an_object_on_each_worker_with_parts_and_its_first_part_right_behind() -> None:
    assert schedule([A, B, A, B], (A, B, C)).begin() == [
        Make(A, None),
        Start(0, 1, A),
        Make(B, None),
        Start(1, 1, B),
    ]


def test_as_many_parts_at_a_time_as_allowed() -> None:
    assert starts(schedule([A] * 5, concurrency=3).begin()) == [(0, A), (1, A), (2, A)]


def test_no_parts() -> None:
    assert schedule([], (A,)).begin() == [Complete()]


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


# a part has ended well


def test_a_worker_gets_its_next_part() -> None:
    made = begun([A, A, B])
    assert made.ended(0, 1, True) == [Start(1, 1, A)]
    assert made.ended(2, 1, True) == []
    assert made.ended(1, 1, True) == [Complete()]
    assert made.is_over


def test_what_ends_twice_counts_once() -> None:
    made = begun([A, A])
    made.ended(0, 1, False)
    assert made.ended(0, 1, False) == []
    assert made.ended(1, 2, False) == [], "no such attempt"


# balance


def test_a_worker_with_nothing_to_do_takes_the_last_of_the_longest_queue() -> None:
    made = begun([A, A, A, B, C, C], balance=True)
    assert made.ended(3, 1, True) == [Moved(2, A, B), Start(2, 1, B)]
    assert made.ended(2, 1, True) == [Moved(1, A, B), Start(1, 1, B)]
    assert made.ended(1, 1, True) == [Moved(5, C, B), Start(5, 1, B)]
    assert made.ended(5, 1, True) == []


def test_one_that_was_given_nothing_takes_as_well_when_all_have_begun() -> None:
    actions = schedule([A, A, A], (C, A), balance=True).begin()
    assert actions == [
        Make(A, None),
        Start(0, 1, A),
        Moved(2, A, C),
        Make(C, None),
        Start(2, 1, C),
    ]


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


def test_one_that_runs_several_is_sent_one_ahead_of_them() -> None:
    made = begun([A, A, A, A], keepers={A}, concurrency=2)
    assert made.ended(1, 1, True) == [Begin(2, 1, A), Start(3, 1, A, is_ahead=True, after=(2, 1))]


def test_what_was_sent_ahead_is_taken_by_one_that_has_nothing_to_do() -> None:
    made = begun([A, A, B], keepers={A, B}, balance=True)
    assert made.ended(2, 1, True) == [Cancel(1, 1), Moved(1, A, B), Start(1, 2, B)]
    assert made.ended(1, 1, True) == [], "the answer of an old attempt"
    assert made.ended(0, 1, True) == []


def test_what_was_sent_ahead_to_a_lost_worker_runs_elsewhere() -> None:
    made = begun([A, A, B], keepers={A, B})
    assert made.lost(A) == [
        Lost(A, (0, 1)),
        Cancel(0, 1),
        Cancel(1, 1),
        Start(0, 2, B, is_ahead=True, after=(2, 1)),
    ]
    assert made.ended(2, 1, True) == [Begin(0, 2, B), Start(1, 2, B, is_ahead=True, after=(0, 2))]


def test_nothing_moves_without_balance() -> None:
    assert begun([A, A, A, B]).ended(3, 1, True) == []


# a part has failed


def test_the_error_of_a_part_ends_the_map_and_what_runs() -> None:
    made = begun([A, B, C, A])
    assert made.failed(1, 1) == [Cancel(0, 1), Cancel(1, 1), Cancel(2, 1), Fail(None)]
    assert made.ended(0, 1, True) == made.failed(2, 1) == made.lost(C) == made.give_up() == []


def test_the_loss_of_a_worker_that_the_part_itself_had_called() -> None:
    assert Fail(None) in begun([A, B]).failed(0, 1, lost=B)
    assert Fail(None) in begun([A, B]).failed(0, 1, lost=D)


def test_giving_up() -> None:
    made = begun([A, A])
    assert made.give_up() == [Cancel(0, 1), Fail(None)]


# a worker is lost


def test_what_it_ran_and_what_waited_for_it_goes_to_those_who_have_least_to_do() -> None:
    made = begun([A, A, B, B, C])
    assert made.lost(A) == [Lost(A, (0, 1)), Cancel(0, 1)]
    assert starts(made.ended(4, 1, False)) == [(0, C)]
    assert starts(made.ended(2, 1, False)) == [(3, B)]
    assert starts(made.ended(3, 1, False)) == [(1, B)]


def test_it_is_noticed_by_the_failure_of_a_part_too_and_once() -> None:
    made = begun([A, B])
    assert made.failed(0, 1, lost=A)[:1] == [Lost(A, (0,))]
    assert made.lost(A) == []
    assert starts(made.ended(1, 1, False)) == [(0, B)]


def test_results_with_a_graph_there_are_void() -> None:
    made = begun([A, A, B], is_recorded=True)
    made.ended(0, 1, True)
    made.ended(1, 1, False)
    assert made.lost(A) == [Lost(A, (0,))]
    assert made.ended(2, 1, True) == [Start(0, 2, B)]
    assert made.ended(0, 2, True) == [Complete()]


def test_results_stay_where_no_graph_is_recorded() -> None:
    made = begun([A, B])
    made.ended(0, 1, True)
    assert made.lost(A) == [Lost(A, ())]
    assert made.ended(1, 1, True) == [Complete()]


def test_the_answer_of_an_attempt_that_was_given_up_is_dropped() -> None:
    made = begun([A, B])
    made.ended(1, 1, False)
    assert starts(made.lost(A)) == [(0, B)]
    assert made.ended(0, 1, False) == made.failed(0, 1) == []
    assert made.ended(0, 2, False) == [Complete()]


def test_parts_below_it_in_the_tree_get_a_new_object_from_the_caller() -> None:
    made = begun([A, B, B], is_recorded=True, fan_out=1)  # A is the parent of B
    made.ended(0, 1, False)
    assert made.lost(A) == [
        Lost(A, (1,)),
        Cancel(1, 1),
        Make(B, None),
        Start(2, 1, B),
    ]
    assert made.ended(2, 1, True) == [Start(1, 2, B)]


def test_results_below_it_in_the_tree_are_void() -> None:
    made = begun([A, B, B], is_recorded=True, fan_out=1)
    made.ended(0, 1, False)
    made.ended(1, 1, True)
    assert Lost(A, (1, 2)) in made.lost(A)


def test_parts_below_it_run_on_where_no_graph_is_recorded() -> None:
    made = begun([A, B, B], fan_out=1)
    made.ended(0, 1, False)
    assert made.lost(A) == [Lost(A, ())]
    assert made.ended(1, 1, False) == [Make(B, None), Start(2, 1, B)]


def test_a_part_that_could_not_begin_because_of_a_worker_above_is_started_again() -> None:
    made = begun([A, B], fan_out=1)
    assert made.failed(1, 1, lost=A) == [Make(B, None), Start(1, 2, B)]
    assert Fail(None) in made.failed(1, 2, lost=A), "now it hangs on nobody"


@pytest.mark.parametrize("homes", [[A], [A, B], [A, A, B]])
def test_parts_that_must_not_run_twice(homes: list[int]) -> None:
    assert begun(homes, may_rerun=False).lost(A)[-1] == Fail(A)


def test_a_worker_whose_parts_are_done_may_go_where_parts_must_not_run_twice() -> None:
    made = begun([A, B], may_rerun=False)
    made.ended(0, 1, True)
    assert made.lost(A) == [Lost(A, ())]
    assert made.ended(1, 1, True) == [Complete()]


def test_nobody_is_left() -> None:
    made = begun([A, B])
    made.lost(A)
    assert made.lost(B) == [Cancel(1, 1), Fail(B)]


def test_one_that_had_nothing_to_do_is_there_for_it() -> None:
    made = begun([A, A], (A, B))
    assert made.lost(A) == [
        Lost(A, (0, 1)),
        Cancel(0, 1),
        Make(B, None),
        Start(0, 2, B),
    ]


def test_a_loss_that_is_known_before_the_beginning() -> None:
    made = schedule([A, B, C], fan_out=1)
    assert made.lost(A) == [Lost(A, (0,))]
    assert made.begin() == [
        Make(B, None),
        Start(1, 1, B),
        Make(C, B),
        Start(2, 1, C),
    ]


def test_a_loss_of_somebody_else() -> None:
    assert begun([A]).lost(D) == []
