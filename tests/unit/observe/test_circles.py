from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.observe.waits import Graph, Needs, circles, stuck, waiting_for

NAMES = "abcdefgh"


def all_of(*others: str) -> Needs:
    return Needs(others)


def any_of(*others: str) -> Needs:
    return Needs(others, of_all=False)


STOPPED = Needs(is_stopped=True)
FREE = Needs()


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    others = st.lists(st.sampled_from(names), unique=True, max_size=3).map(tuple)
    kinds = st.builds(Needs, others, st.booleans(), st.sampled_from((False, False, False, True)))
    return {name: draw(kinds) for name in names}


def test_who_waits_for_a_free_one_goes_on() -> None:
    assert stuck({"a": all_of("b"), "b": FREE}) == set()


def test_who_waits_for_a_stopped_one_is_stuck_but_in_no_circle() -> None:
    graph = {"a": all_of("b", "c"), "b": STOPPED, "c": FREE}
    assert stuck(graph) == {"a", "b"}
    assert circles(graph) == []


def test_any_free_one_is_enough_for_who_needs_any() -> None:
    assert stuck({"a": any_of("b", "c"), "b": STOPPED, "c": FREE}) == {"b"}


def test_two_that_wait_for_each_other_are_a_circle() -> None:
    assert circles({"b": all_of("a"), "a": all_of("b"), "c": all_of("a")}) == [["a", "b"]]


def test_one_that_waits_for_itself_is_a_circle() -> None:
    assert circles({"a": all_of("a")}) == [["a"]]


def test_a_way_out_is_no_circle() -> None:
    assert circles({"a": any_of("b", "c"), "b": all_of("a"), "c": FREE}) == []


def test_separate_circles_are_all_found() -> None:
    graph = {"a": all_of("b"), "b": all_of("a"), "c": any_of("d"), "d": all_of("c")}
    assert circles(graph) == [["a", "b"], ["c", "d"]]


def test_of_several_ways_back_the_shortest_is_told() -> None:
    graph = {"a": all_of("b", "c"), "b": all_of("c"), "c": all_of("d"), "d": all_of("a", "b")}
    assert [len(circle) for circle in circles(graph)] == [3]


@given(graphs())
def test_the_stuck_can_be_ended_by_none_outside(graph: Graph) -> None:
    left = stuck(graph)
    for name in left:
        needs = graph[name]
        met = [other not in left for other in needs.others]
        assert needs.is_stopped or not (all(met) if needs.of_all else any(met))
        assert needs.is_stopped or needs.others


@given(graphs())
def test_the_others_can_end_one_after_the_other(graph: Graph) -> None:
    going: set[str] = set()
    left = set(graph) - stuck(graph)
    while left:
        ready = {name for name in left if graph[name].are_met(going)}
        assert ready, "none of those that go on can be the next"
        going |= ready
        left -= ready


@given(graphs())
def test_circles_are_circles_of_stuck_ones(graph: Graph) -> None:
    among = stuck(graph)
    for circle in circles(graph):
        assert set(circle) <= among
        assert len(set(circle)) == len(circle)
        for name, following in zip(circle, circle[1:] + circle[:1], strict=True):
            assert following in graph[name].others


@given(graphs())
def test_without_stopped_ones_whatever_is_stuck_leads_to_a_circle(graph: Graph) -> None:
    among = stuck(graph)
    if any(needs.is_stopped for needs in graph.values()):
        return
    in_circles = {name for circle in circles(graph) for name in circle}
    for name in among:
        ends = {other for other in in_circles if name in waiting_for(graph, other)}
        assert name in in_circles or ends


@given(graphs(), st.sampled_from(NAMES))
def test_those_who_wait_reach_the_one_they_wait_for(graph: Graph, name: str) -> None:
    if name not in graph:
        return
    waiting = waiting_for(graph, name)
    direct = {each for each, needs in graph.items() if name in needs.others and each != name}
    assert direct <= waiting
    assert all(set(graph[each].others) & (waiting | {name}) for each in waiting)


@pytest.mark.parametrize("size", [300])
def test_a_chain_of_many_workers_takes_no_recursion(size: int) -> None:
    graph = {f"n{at:03}": all_of(f"n{(at + 1) % size:03}") for at in range(size)}
    assert len(circles(graph)[0]) == size
