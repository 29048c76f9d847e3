"""Tests tables, their CSV form, and runs in virtual time."""

from __future__ import annotations

import pytest

from torchweft.errors import ConfigurationError
from torchweft.pipeline.schedules import (
    Action,
    CellError,
    Costs,
    Kind,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    SchedulePipeDream,
    ScheduleZBVZeroBubble,
    Span,
    Table,
    Weights,
    check,
    predict,
)
from torchweft.pipeline.schedules.table import Run, chain, run


def test_the_grid_shows_time_steps_and_idle_cells() -> None:
    assert Schedule1F1B(3).table(2).text() == (
        "step     0   1   2   3   4   5   6   7\n"
        "worker 0 0F0 0F1     0B0 0F2 0B1     0B2\n"
        "worker 1     1F0 1B0 1F1 1B1 1F2 1B2\n"
    )


def test_the_grid_shows_updates_without_a_step() -> None:
    assert SchedulePipeDream(2).table(2).text() == (
        "step     0   1   2    3    4    5\n"
        "worker 0 0F0 0F1      0B0U      0B1U\n"
        "worker 1     1F0 1B0U 1F1  1B1U\n"
    )


def test_the_grid_follows_the_stage_graph() -> None:
    table = Table.from_csv("0F0,0B0\n1F0,1B0")
    assert table.text(edges=[]) == "step     0   1\nworker 0 0F0 0B0\nworker 1 1F0 1B0\n"


def test_the_grid_of_a_wrong_table_ends_where_it_stops() -> None:
    table = Table.from_csv("0F0,0B0\n1B0,1F0")
    assert table.text() == "step     0\nworker 0 0F0\nworker 1\n"


def test_a_table_knows_which_worker_has_which_stage() -> None:
    table = ScheduleZBVZeroBubble(6).table(3)
    assert [table.stages_of(worker) for worker in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [table.worker_of(stage, 2) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert ScheduleZBVZeroBubble(6).placement(3)[2] == (2, 3)
    with pytest.raises(KeyError):
        table.worker_of(6, 0)
    assert ScheduleInterleaved1F1B(4, 3).placement(2) == ((0, 2, 4), (1, 3, 5))


def test_a_table_knows_replicas() -> None:
    table = SchedulePipeDream(6, replicas=(3, 1)).table(4)
    assert table.replicas(0) == (0, 1, 2)
    assert table.replicas(1) == (3,)
    assert table.replicas(2) == ()
    assert [table.worker_of(0, minibatch) for minibatch in range(6)] == [0, 1, 2, 0, 1, 2]
    assert table.is_asynchronous
    assert not Schedule1F1B(6, replicas=(3, 1)).table(4).is_asynchronous


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


def test_zero_bubbles_of_2_ranks_with_2_stages_each_and_idle_cells() -> None:
    table = ScheduleInterleavedZeroBubble(8).table(2)
    lines = table.to_csv().splitlines()
    text = lines[0].replace("2F0,", "2F0,,") + "\r\n," + lines[1] + "\r\n\r\n"
    assert ",,2F1" in text
    read = Table.from_csv(text)
    assert read.rows == table.rows
    assert predict(read, Costs.uniform(4)).makespan_s == 2 * 3 * 8 + 1


def test_blanks_around_actions_do_not_count() -> None:
    read = Table.from_csv(" 0F0,\t0F1 , (0F2 ; 0B0)OVERLAP_F_B,0B1,  ,0B2\n")
    assert read.to_csv() == "0F0,0F1,0F2,0B0,0B1,0B2\n"


def test_communication_is_passed_over() -> None:
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD1"
    read = Table.from_csv(text, name="mine", weights=Weights.VERTICAL_SYNC)
    assert read.to_csv() == "0F0,0B0\n1F0,1B0\n"
    assert (read.name, read.weights) == ("mine", Weights.VERTICAL_SYNC)
    check(read)


def test_a_worker_without_actions_stays() -> None:
    table = Table("t", 1, 1, ((Action(0, Kind.FORWARD, 0),), (), ()))
    assert table.to_csv() == "0F0\n,\n,\n"
    assert Table.from_csv(table.to_csv(), name="t") == table


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


def ran(rows: str, latency_s: float = 0.0) -> Run:
    table = Table.from_csv(rows)
    return run(table.rows, chain(table.n_stages), lambda action: 1.0, latency_s)


def test_an_action_starts_when_its_worker_is_free_and_its_needs_are_there() -> None:
    result = ran("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", latency_s=0.5)
    assert result.missing == {}
    assert [span.start_s for span in result.spans[0]] == [0, 1, 4, 6]
    assert [span.start_s for span in result.spans[1]] == [1.5, 2.5, 3.5, 4.5]
    assert isinstance(result.spans[0][0], Span)


def test_a_worker_that_waits_for_ever_is_reported_with_the_missing_result() -> None:
    result = ran("0F0,0B0\n1I0,1F0")
    assert [len(row) for row in result.spans] == [1, 0]
    assert {worker: str(need) for worker, need in result.missing.items()} == {0: "1I0", 1: "1F0"}


def test_an_update_needs_the_minibatches_since_the_last_one_of_every_replica() -> None:
    result = ran("0F0,0B0,0U1,0F2,0B2,0U3\n0F1,0F3,0B1,0U1,0B3,0U3")
    ends = {str(span.action): span.end_s for row in result.spans for span in row}
    assert result.missing == {}
    assert ends["0F2"] == 5
    assert result.spans[0][2].start_s == 3
