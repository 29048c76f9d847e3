from __future__ import annotations

import pytest

from torchweft.pipeline.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    SchedulePipeDream,
    ScheduleZBVZeroBubble,
    Table,
)


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
