from __future__ import annotations

import pytest

from tests.unit.pipeline.schedules.all_schedules import V_SHAPED
from torchweft.pipeline.schedules import ScheduleDualPipeV, ScheduleError, ScheduleZBVZeroBubble


def test_rows_of_zbv() -> None:
    assert ScheduleZBVZeroBubble(4).table(2).to_csv() == (
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0F3,0I0,0W0,3F2,3I2,3W2,0I1,0W1,3F3,3I3,3W3,"
        "0I2,0W2,0I3,0W3\n"
        "1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1F3,1I1,1W1,2F3,2I2,2W2,1I2,2I3,"
        "1I3,1W2,2W3,1W3\n"
    )


def test_rows_of_dualpipev() -> None:
    assert ScheduleDualPipeV(4).table(2).to_csv() == (
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,0F3,3B1,3F2,0B0,3B2,3F3,0B1,3B3,0I2,0W2,0I3,0W3\n"
        "1F0,2F0,1F1,2F1,1F2,2B0,2F2,1B0,1F3,2B1,2F3,1B1,2B2,1B2,2I3,1I3,2W3,1W3\n"
    )


@pytest.mark.parametrize("kind", V_SHAPED)
@pytest.mark.parametrize("n_workers", [1, 2, 5])
def test_a_v_needs_two_microbatches_for_each_worker(kind: type, n_workers: int) -> None:
    kind(2 * n_workers).table(n_workers)
    with pytest.raises(ScheduleError, match=rf"at least 2p .*; pass {2 * n_workers} or more$"):
        kind(2 * n_workers - 1).table(n_workers)
