from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reports import (
    LONG_S,
    calling,
    gathering,
    report,
    served,
    thread,
)
from torchweft.engine.protocol.observing import PASS, SHUTDOWN, Wait, making_key
from torchweft.observe.waits import (
    Graph,
    Needs,
    WaitGraph,
    as_json,
    circles,
    explain,
    stuck,
    waiting_for,
)
from torchweft.reports import Report

SILENT = {"b": "does not answer"}


def workers_in_circles(*reports: Report, silent: dict[str, str] | None = None) -> list[set[str]]:
    graph = WaitGraph(reports, silent or {})
    return [{each.worker for each in circle if each.worker} for circle in graph.circles()]


def pair(age_s: float = LONG_S) -> list[Report]:
    """Two workers, each of whose functions calls a function of the other that takes a lock."""
    reports = []
    for me, other in (("a", "b"), ("b", "a")):
        reports.append(
            report(
                me,
                thread("one", serves=f"driver#{me}", waits=(calling(me, 1, other, age_s),)),
                thread("two", serves=f"{other}#1", is_at_lock=True),
                served=(served("driver", me), served(other, 1)),  # type: ignore[arg-type]
            )
        )
    return reports


def test_calls_that_wait_for_locks_of_each_other_are_perhaps_a_deadlock() -> None:
    assert workers_in_circles(*pair()) == [{"a", "b"}]
    assert explain(WaitGraph(pair(), {})).startswith(
        "deadlock, perhaps: a and b wait for each other"
    )


def test_calls_that_wait_for_each_other_are_a_deadlock() -> None:
    a = report("a", thread(serves="b#1", waits=(calling("a", 1, "b"),)), served=(served("b", 1),))
    b = report("b", thread(serves="a#1", waits=(calling("b", 1, "a"),)), served=(served("a", 1),))
    assert workers_in_circles(a, b) == [{"a", "b"}]
    assert explain(WaitGraph([a, b], {})).startswith("deadlock: a and b wait for each other")


def test_a_call_in_line_waits_for_the_calls_that_hold_the_slots() -> None:
    a = report(
        "a",
        thread(serves="b#1", is_at_lock=False, waits=(calling("a", 1, "b"),)),
        served=(served("b", 1),),
    )
    waiting = served("a", 1, has_begun=False)
    holder = served("c", 9)
    b = report(
        "b",
        thread("main", waits=(calling("b", 1, "a"),)),
        thread("weft-b-1", serves="c#9", is_at_lock=True),
        served=(waiting, holder),
        slots=1,
        running=1,
        queued=1,
    )
    assert workers_in_circles(a, b) == [{"a", "b"}]
    free = report("b", thread("main", waits=(calling("b", 1, "a"),)), served=(waiting,), slots=1)
    assert workers_in_circles(a, free) == []


def test_a_barrier_waits_for_those_who_have_not_come() -> None:
    wait = gathering("a", "b", "c")
    come = [report(name, thread(waits=(wait,))) for name in "ab"]
    idle = report("c", thread(is_idle=True))
    graph = WaitGraph([*come, idle], {})
    assert graph.circles() == []
    assert "a and b wait, in the end, for\n  c: worker 'c', which does nothing" in explain(graph)


def test_barriers_in_another_order_are_a_deadlock() -> None:
    a = report("a", thread(waits=(gathering("a", "b", number=1),)))
    b = report("b", thread(waits=(gathering("a", "b", number=2),)))
    assert workers_in_circles(a, b) == [{"a", "b"}]


def test_a_worker_that_can_come_to_a_barrier_by_another_thread_is_no_deadlock() -> None:
    wait = gathering("a", "b")
    a = report("a", thread(waits=(wait,)))
    b = report(
        "b",
        thread(waits=(calling("b", 1, "a"),)),
        thread("weft-b-1", serves="x#1"),
        served=(served("x", 1),),
    )
    assert workers_in_circles(a, b) == []


def test_a_backward_pass_waits_for_the_workers_that_it_lacks() -> None:
    wait = Wait(PASS, "7", LONG_S, "a backward pass", ("b",))
    a = report("a", thread(waits=(wait,)))
    assert "which does not answer" in explain(WaitGraph([a], SILENT))
    full = report(
        "b",
        thread("weft-b-1", serves="a#1", is_at_lock=True),
        thread("other", waits=(calling("b", 1, "a"),)),
        served=(served("a", 1),),
        slots=1,
        running=1,
        queued=3,
    )
    led = report("a", thread(serves="b#1", waits=(wait,)), served=(served("b", 1),))
    assert workers_in_circles(led, full) == [{"a", "b"}]


def test_a_value_waits_for_the_call_that_makes_it() -> None:
    key = making_key("R")
    fetch = served("a", 1, awaits="R")
    maker = served("a", 0, makes="R")
    maker = type(maker)(key, *[getattr(maker, n) for n in list(maker.__slots__)[1:]])
    b = report(
        "b",
        thread("weft-b-1", serves=key, waits=(calling("b", 1, "a"),)),
        served=(fetch, maker),
    )
    a = report("a", thread(serves="b#1", waits=(calling("a", 1, "b"),)), served=(served("b", 1),))
    assert workers_in_circles(a, b) == [{"a", "b"}]


def test_a_worker_in_shutdown_does_not_come_to_a_barrier() -> None:
    leaving = Wait(SHUTDOWN, "", LONG_S, "shutdown", ("a",))
    a = report("a", thread(waits=(gathering("a", "b"),)))
    b = report("b", thread(waits=(leaving,)))
    said = explain(WaitGraph([a, b], {}))
    assert "b: worker 'b', which does nothing" in said


NAMES = "abcd"
waits = st.one_of(
    st.builds(calling, st.sampled_from(NAMES), st.integers(1, 3), st.sampled_from(NAMES + "x")),
    st.builds(
        lambda workers, number: gathering(*sorted(workers), number=number),
        st.sets(st.sampled_from(NAMES), min_size=1),
        st.integers(0, 2),
    ),
    st.builds(
        lambda workers: Wait(SHUTDOWN, "", LONG_S, "shutdown", tuple(sorted(workers))),
        st.sets(st.sampled_from(NAMES), min_size=1),
    ),
)
threads = st.builds(
    lambda name, serves, waits, is_at_lock: thread(
        name, serves=serves, waits=tuple(waits), is_at_lock=is_at_lock
    ),
    st.sampled_from(("MainThread", "one", "two")),
    st.sampled_from(("", "a#1", "b#1", "c#2", "d#3")),
    st.lists(waits, max_size=2),
    st.booleans(),
)
calls = st.builds(
    lambda caller, number, has_begun: served(caller, number, has_begun=has_begun),
    st.sampled_from(NAMES),
    st.integers(1, 3),
    st.booleans(),
)


@given(
    st.dictionaries(
        st.sampled_from(NAMES),
        st.tuples(
            st.lists(threads, max_size=3, unique_by=lambda each: each.name),
            st.lists(calls, max_size=3, unique_by=lambda each: each.key),
            st.integers(0, 2),
        ),
    ),
    st.sets(st.sampled_from(NAMES)),
)
def test_any_reports_make_a_graph_whose_every_node_is_there(
    told: dict[str, tuple[list[object], list[object], int]], silent: set[str]
) -> None:
    reports = [
        report(name, *running, served=tuple(serving), slots=1, running=queued, queued=queued)  # type: ignore[arg-type]
        for name, (running, serving, queued) in told.items()
    ]
    graph = WaitGraph(reports, dict.fromkeys(silent - told.keys(), "does not answer"))
    needs = graph.needs
    assert all(other in needs for each in needs.values() for other in each.others)
    for circle in graph.circles():
        assert any(activity.waits for activity in circle)
    assert explain(graph)
    assert as_json(graph)["silent"] == graph.silent


LETTERS = "abcdefgh"


def all_of(*others: str) -> Needs:
    return Needs(others)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    names = LETTERS[: draw(st.integers(1, len(LETTERS)))]
    others = st.lists(st.sampled_from(names), unique=True, max_size=3).map(tuple)
    kinds = st.builds(Needs, others, st.booleans(), st.sampled_from((False, False, False, True)))
    return {name: draw(kinds) for name in names}


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


@given(graphs(), st.sampled_from(LETTERS))
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
