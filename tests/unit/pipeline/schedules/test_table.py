"""Tests tables, their CSV form, runs in virtual time, and checks."""

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
    CellError,
    Costs,
    Kind,
    Schedule1F1B,
    ScheduleDualPipeV,
    Table,
    TableError,
    Weights,
    check,
)
from torchweft.pipeline.schedules.table import chain


def test_the_grid_of_a_wrong_table_ends_where_it_stops() -> None:
    table = Table.from_csv("0F0,0B0\n1B0,1F0")
    assert table.text() == "step     0\nworker 0 0F0\nworker 1\n"


def with_pairs(row: tuple[Action, ...]) -> str:
    """Writes a row as torch writes DualPipeV: a forward and a whole backward pass as one cell."""
    cells: list[str] = []
    for action in row:
        if action.kind is Kind.BACKWARD and cells and cells[-1].rsplit("F", 1)[0].isdigit():
            cells[-1] = f"({cells[-1]};{action})OVERLAP_F_B"
        else:
            cells.append(str(action))
    return ",".join(cells)


def test_dualpipev_of_4_ranks_with_10_microbatches_in_pairs() -> None:
    table = ScheduleDualPipeV(10).table(4)
    text = "\n".join(map(with_pairs, table.rows))
    assert "(0F7;7B3)OVERLAP_F_B,(7F4;0B0)OVERLAP_F_B" in text
    read = Table.from_csv(text)
    assert read.rows == table.rows
    assert (read.n_stages, read.n_microbatches, read.n_workers) == (8, 10, 4)
    check(read)


def test_communication_is_passed_over() -> None:
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD1"
    read = Table.from_csv(text, name="mine", weights=Weights.VERTICAL_SYNC)
    assert read.to_csv() == "0F0,0B0\n1F0,1B0\n"
    assert (read.name, read.weights) == ("mine", Weights.VERTICAL_SYNC)
    check(read)


@pytest.mark.parametrize(
    "cell",
    [
        "F0",
        "0F",
        "0X0",
        "0BW0",
        "-1F0",
        "0f0",
        "0F0 1",
        "٣F0",
        "(0F1;1B0)",
        "(0F1)OVERLAP_F_B",
        "(0F1;1B0;2B0)OVERLAP_F_B",
        "(0F1;0SEND_F1)OVERLAP_F_B",
        "0SEND_F",
        '"0F0"',
        "9" * 5000 + "F0",
    ],
)
def test_other_cells_are_refused(cell: str) -> None:
    with pytest.raises(CellError, match=r"^row 1, column 2: .* is no action; a cell is") as caught:
        Table.from_csv(f"0F0,0F1,0F2\n1F0, ,{cell},1B0")
    assert (caught.value.row, caught.value.column, caught.value.cell) == (1, 2, cell)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["", "\n\n", ",,\n,", "0SEND_F0"])
def test_a_text_without_actions_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="the CSV text has no action"):
        Table.from_csv(text)


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
