from __future__ import annotations

import pytest

from tests.unit.pipeline.schedules.all_schedules import fits_rounds
from torchweft.errors import ConfigurationError
from torchweft.pipeline.schedules import (
    ScheduleError,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)


def test_rows_take_turns_at_the_stages_in_rounds() -> None:
    assert ScheduleInterleaved1F1B(4).table(2).to_csv() == (
        "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3\n"
        "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3\n"
    )


def test_rows_of_split_backward_passes() -> None:
    assert ScheduleInterleavedZeroBubble(2).table(2).to_csv() == (
        "0F0,0F1,2F0,2F1,2I0,2W0,2I1,2W1,0I0,0W0,0I1,0W1\n"
        "1F0,1F1,3F0,3I0,3F1,3I1,3W0,1I0,3W1,1I1,1W0,1W1\n"
    )


def test_rows_breadth_first() -> None:
    assert ScheduleLoopedBFS(2).table(2).to_csv() == (
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1\n"
    )


def test_a_worker_has_a_stage() -> None:
    with pytest.raises(ConfigurationError, match="stages_per_worker is 0; pass 1 or more"):
        ScheduleInterleaved1F1B(4, 0)


@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble])
def test_rounds_are_of_one_size(kind: type) -> None:
    for n_workers in (1, 3, 4):
        for m in range(1, 4 * n_workers):
            if fits_rounds(m, n_workers):
                kind(m).table(n_workers)
            else:
                with pytest.raises(ScheduleError) as caught:
                    kind(m).table(n_workers)
                *_, fewer, _, more = str(caught.value).split()
                assert int(fewer) < m < int(more)
                for fitting in (int(fewer), int(more)):
                    kind(fitting).table(n_workers)


def test_the_error_has_the_numbers() -> None:
    with pytest.raises(ScheduleError) as caught:
        ScheduleInterleaved1F1B(11, stages_per_worker=3).table(4)
    assert str(caught.value) == (
        "ScheduleInterleaved1F1B on 4 workers (12 stages) cannot have 11 micro-batches: it "
        "requires a multiple of p, or at least of n_microbatches // p, micro-batches; pass 10 or 12"
    )
    error = caught.value
    assert (error.schedule, error.n_workers, error.n_stages, error.n_microbatches) == (
        "ScheduleInterleaved1F1B",
        4,
        12,
        11,
    )
    assert isinstance(error, ConfigurationError)
