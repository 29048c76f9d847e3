from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.thorough import share
from tests.unit.pipeline.schedules.all_schedules import AnySchedule, rerun, schedules
from torchweft.errors import ConfigurationError
from torchweft.pipeline.schedules import (
    Action,
    Costs,
    Kind,
    Schedule1F1B,
    ScheduleGPipe,
    SchedulePipeDream,
    ScheduleZBH1,
    ScheduleZBVZeroBubble,
    Table,
    TableError,
    check,
)
from torchweft.pipeline.schedules.table import chain

Drawn = tuple[AnySchedule, int]


def altered(table: Table, worker: int, row: Sequence[Action]) -> Table:
    rows = list(table.rows)
    rows[worker] = tuple(row)
    return Table(table.name, table.n_stages, table.n_microbatches, tuple(rows), table.weights)


def refused(table: Table, edges: Sequence[tuple[int, int]] | None = None) -> TableError:
    with pytest.raises(TableError) as caught:
        check(table, edges)
    return caught.value


def place_of(table: Table, data: st.DataObject) -> tuple[int, int]:
    worker = data.draw(st.integers(0, table.n_workers - 1))
    return worker, data.draw(st.integers(0, len(table.rows[worker]) - 1))


@settings(max_examples=share(200))
@given(schedules(4), st.data())
def test_a_dropped_action_is_named(drawn: Drawn, data: st.DataObject) -> None:
    schedule, n_workers = drawn
    table = schedule.table(n_workers)
    worker, place = place_of(table, data)
    row = table.rows[worker]
    lost = row[place]
    assume(lost.kind is not Kind.UPDATE)
    error = refused(altered(table, worker, row[:place] + row[place + 1 :]))
    assert error.action == str(lost)
    assert error.position is None
    assert error.worker == worker


@settings(max_examples=share(200))
@given(schedules(4), st.data())
def test_a_doubled_action_is_named(drawn: Drawn, data: st.DataObject) -> None:
    schedule, n_workers = drawn
    table = schedule.table(n_workers)
    worker, place = place_of(table, data)
    row = table.rows[worker]
    assume(row[place].kind is not Kind.UPDATE)
    error = refused(altered(table, worker, (*row, row[place])))
    assert error.action == str(row[place])
    assert error.worker == worker
    assert f"{row[place]} is " in str(error)


@settings(max_examples=share(200))
@given(schedules(4), st.data())
def test_a_forward_pass_after_its_backward_pass_is_named(drawn: Drawn, data: st.DataObject) -> None:
    schedule, n_workers = drawn
    table = schedule.table(n_workers)
    worker, place = place_of(table, data)
    row = list(table.rows[worker])
    forward = row[place]
    assume(forward.kind is Kind.FORWARD)
    other = next(
        n
        for n, each in enumerate(row)
        if (each.stage, each.microbatch) == (forward.stage, forward.microbatch) and n != place
    )
    row[place], row[other] = row[other], row[place]
    error = refused(altered(table, worker, row))
    wait = f"worker {worker}, position {place}: {row[place]} waits for "
    assert wait in str(error)


@settings(max_examples=share(300))
@given(schedules(4), st.data())
def test_swapped_actions_are_refused_if_another_model_stops(
    drawn: Drawn, data: st.DataObject
) -> None:
    schedule, n_workers = drawn
    table = schedule.table(n_workers)
    assume(not table.is_asynchronous)
    worker, place = place_of(table, data)
    row = list(table.rows[worker])
    other = min(place + data.draw(st.integers(1, 3)), len(row) - 1)
    row[place], row[other] = row[other], row[place]
    swapped = altered(table, worker, row)
    costs = Costs.uniform(table.n_stages)
    if rerun(swapped.rows, chain(table.n_stages), costs) is None:
        error = refused(swapped)
        assert error.worker is not None
        assert error.position is not None
        assert str(swapped.rows[error.worker][error.position]) == error.action
    else:
        check(swapped)


def test_workers_that_wait_in_a_circle_are_all_named() -> None:
    error = refused(Table.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", name="mine"))
    assert str(error) == (
        "mine stops before its end, as actions wait for ever: worker 0, position 1: 0B0 waits for "
        "1I0; worker 1, position 1: 1F1 waits for 0F1"
    )
    assert (error.worker, error.position, error.action) == (0, 1, "0B0")
    assert error.waits_for == "1I0"


def test_a_pass_on_another_worker_is_refused() -> None:
    error = refused(Table.from_csv("0F0,0F1,0B1\n0B0"))
    assert str(error) == (
        "worker 1, position 0: 0B0 is on another worker than the other actions of its stage and "
        "micro-batch"
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F0", "worker 0: 0B0 is missing: stage 0 needs F and B of micro-batch 0, or F, I and W"),
        (
            "0F0,0I0",
            "worker 0: 0W0 is missing: stage 0 needs F and B of micro-batch 0, or F, I and W",
        ),
        (
            "0F0,0W0",
            "worker 0: 0I0 is missing: stage 0 needs F and B of micro-batch 0, or F, I and W",
        ),
        (
            "0F0,0B0,0I0,0W0",
            "worker 0, position 1: 0B0 is one too many: stage 0 needs F and B of micro-batch 0, or "
            "F, I and W",
        ),
        ("0B0", "worker 0: 0F0 is missing: stage 0 needs F and B of micro-batch 0, or F, I and W"),
        ("1F0,1B0", "0F0 is missing: stage 0 needs F and B of micro-batch 0, or F, I and W"),
        (
            "0F0,0W0,0I0",
            "t stops before its end, as actions wait for ever: worker 0, position 1: 0W0 waits for "
            "0I0",
        ),
    ],
)
def test_each_mistake_has_its_message(row: str, message: str) -> None:
    assert str(refused(Table.from_csv(row, name="t"))) == message


@pytest.mark.parametrize("action", [Action(2, Kind.FORWARD, 0), Action(0, Kind.FORWARD, -1)])
def test_an_action_out_of_range_is_refused(action: Action) -> None:
    table = Schedule1F1B(3).table(2)
    error = refused(altered(table, 1, (action, *table.rows[1])))
    assert str(error) == (
        f"worker 1, position 0: {action} is out of range; Schedule1F1B has the stages 0 to 1 and "
        "the micro-batches 0 to 2"
    )


def test_an_update_waits_for_its_minibatches() -> None:
    error = refused(Table.from_csv("0F0,0U0,0B0,0F1,0B1,0U1"))
    assert (error.action, error.waits_for) == ("0U0", "0W0")


@pytest.mark.parametrize(
    ("schedule", "n_workers", "n_stages"),
    [
        (Schedule1F1B(6), 4, 4),
        (ScheduleGPipe(6), 4, 4),
        (ScheduleZBH1(6), 4, 4),
        (ScheduleZBVZeroBubble(6), 3, 6),
        (SchedulePipeDream(6), 4, 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_skip_connections_are_waited_for(
    schedule: AnySchedule, n_workers: int, n_stages: int
) -> None:
    table = schedule.table(n_workers)
    skips = [(u, v) for u in range(n_stages) for v in range(u + 1, n_stages)]
    check(table, skips)
    check(table, [])
    check(table, [(0, n_stages - 1)])


def test_a_skip_connection_may_stop_a_table() -> None:
    rows = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"
    table = Table.from_csv(rows + "2F0,2B0,2F1,2B1")
    check(table, [(0, 2)])
    error = refused(table, [(0, 2), (1, 2), (0, 1)])
    assert error.action == "0B0"
    assert error.waits_for == "1I0"


def test_edges_are_between_stages_of_the_table() -> None:
    with pytest.raises(ConfigurationError, match=r"edge \(1, 2\) names a stage that .* 0 to 1$"):
        check(Schedule1F1B(2).table(2), [(0, 1), (1, 2)])
