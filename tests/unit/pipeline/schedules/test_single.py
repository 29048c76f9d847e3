from __future__ import annotations

import pytest

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.pipeline.schedules import (
    Schedule,
    Schedule1F1B,
    ScheduleError,
    ScheduleGPipe,
    ScheduleNaive,
    ScheduleZBH1,
)


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        (ScheduleNaive(2), "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"),
        (ScheduleGPipe(2), "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"),
        (Schedule1F1B(3), "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"),
        (ScheduleZBH1(2), "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"),
        (Schedule1F1B(1), "0F0,0B0\n1F0,1B0\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rows_of_two_workers(schedule: Schedule, rows: str) -> None:
    assert schedule.table(2).to_csv() == rows


def test_replicas_take_turns() -> None:
    rows = "0F0,0F2,0B0,0F4,0B2,0B4\n0F1,0F3,0B1,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,1F4,1B4\n"
    assert Schedule1F1B(5, replicas=(2, 1)).table(3).to_csv() == rows
    assert Schedule1F1B(5, replicas=(2, 1)).placement(3) == ((0,), (0,), (1,))


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_replicas_fit_workers_and_microbatches(kind: type) -> None:
    with pytest.raises(ScheduleError, match=r"sum is 5, or 4 workers"):
        kind(8, replicas=(3, 1)).table(5)
    with pytest.raises(ScheduleError, match=r"for each replica of a stage; pass 3 or more"):
        kind(2, replicas=(3, 1)).table(4)
    with pytest.raises(ConfigurationError, match=r"replicas are \(3, 0\); .*, each 1 or more"):
        kind(2, replicas=(3, 0))
    with pytest.raises(ArgumentTypeError, match=r"replicas is 4, an int; pass the number of"):
        kind(2, replicas=4)
    assert kind(3, replicas=[2, 1]).replicas == (2, 1)
