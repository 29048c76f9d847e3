from __future__ import annotations

import pytest

from torchweft.errors import ConfigurationError
from torchweft.pipeline.schedules import (
    Action,
    CellError,
    Costs,
    Kind,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    Table,
    Weights,
    check,
    predict,
)


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
