"""Idle shares of pipelines as measured on workers: those that the schedules promise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchweft
from tests.contract.end_to_end.sleeping_stages import Sleeping
from tests.contract.processes.pipeline_models import Descent
from torchweft.pipeline import (
    Pipe,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleNaive,
    SchedulePipeDream,
    ScheduleZBVZeroBubble,
)

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1", "worker2", "worker3"]
UNIT_S = 0.03
"""Long beside the time to send a value and to wake up, also on busy cores."""
STEPS = 3
MINIBATCHES = 80
POINTS = 0.05


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    with torchweft.cluster(workers=4):
        yield


@pytest.mark.parametrize(
    ("schedule", "idle_percent", "held"),
    [
        (ScheduleGPipe(8), 27.3, (8, 8, 8, 8)),
        (Schedule1F1B(8), 27.3, (4, 3, 2, 1)),
        (ScheduleInterleaved1F1B(8, 2), 15.8, (11, 9, 7, 5)),
        (ScheduleZBVZeroBubble(8), 5.9, (8, 8, 8, 8)),
        (ScheduleNaive(8), 75.0, (1, 1, 1, 1)),
    ],
    ids=["gpipe", "1f1b", "interleaved", "zbv", "naive"],
)
def test_idle_shares_of_sleeping_stages(
    schedule: Any, idle_percent: float, held: tuple[int, ...]
) -> None:
    n_stages = schedule.table(4).n_stages
    stages = [Sleeping(4 / n_stages * UNIT_S) for _ in range(n_stages)]
    batch = torch.zeros(8, 4)
    with Pipe(stages, WORKERS, schedule, nn.functional.mse_loss) as pipe:
        pipe.step(batch, batch)  # Workers connect on first use.
        with pipe.recording() as recording:
            for _ in range(STEPS):
                pipe.step(batch, batch)
    print(f"\n{recording.report()}")
    # On a busy machine one step may be held up: the shortest is what the schedule takes.
    measured = min(recording.steps, key=lambda step: step.makespan_s)
    predicted = recording.predicted
    assert measured.idle_share == pytest.approx(idle_percent / 100, abs=POINTS)
    assert predicted.idle_share == pytest.approx(idle_percent / 100, abs=POINTS)
    assert measured.makespan_s == pytest.approx(predicted.makespan_s, rel=0.15)
    assert recording.peak_held == held == predicted.peak_activations
    assert recording.clock_error_s == 0


def test_the_idle_share_of_a_run_without_a_break() -> None:
    batch = torch.zeros(1, 4)
    stages = [Sleeping(UNIT_S) for _ in WORKERS]
    schedule = SchedulePipeDream()
    descent: Any = Descent
    with Pipe(stages, WORKERS, schedule, nn.functional.mse_loss, optimizer=descent) as pipe:
        for _ in pipe.run([(batch, batch)]):  # Workers connect on first use.
            pass
        with pipe.recording() as recording:
            assert len(list(pipe.run([(batch, batch)] * MINIBATCHES))) == MINIBATCHES
        held = pipe.versions_held()
    print(f"\n{recording.report()}")
    measured, predicted = recording.timeline, recording.predicted
    # 3 units for each minibatch, and 9 until the first of them is back.
    assert measured.idle_share == pytest.approx(9 / (3 * MINIBATCHES + 9), abs=POINTS)
    assert predicted.idle_share == pytest.approx(0.036, abs=POINTS)
    assert measured.makespan_s == pytest.approx(predicted.makespan_s, rel=0.15)
    assert recording.peak_held == (4, 3, 2, 1) == predicted.peak_activations
    assert tuple(held) == (4, 3, 2, 1) == predicted.peak_versions
