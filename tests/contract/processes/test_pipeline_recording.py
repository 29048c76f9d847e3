"""Recordings of a pipeline's steps: which steps they have, and when they are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes.pipeline_models import WIDTH, Descent, Failing, layers
from torchweft.errors import ConfigurationError, PipelineError
from torchweft.launch import Nursery
from torchweft.pipeline import (
    Pipe,
    Schedule1F1B,
    SchedulePipeDream,
    ScheduleZBVZeroBubble,
)
from torchweft.pipeline.schedules import Kind

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1", "worker2"]
mse = nn.functional.mse_loss


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=3, nursery=nursery):
        yield


def example(sign: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = sign * torch.rand(12, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(12, WIDTH, generator=generator, dtype=torch.float64)


def test_a_recording_has_the_steps_of_its_block() -> None:
    with Pipe(layers(6), WORKERS, ScheduleZBVZeroBubble(6), mse) as pipe:
        pipe.step(*example())
        with pipe.recording() as recorded:
            for _ in range(3):
                pipe.step(*example())
            pipe(example()[0])  # Evaluation is left out.
        pipe.step(*example())
    assert len(recorded.steps) == 3
    assert recorded.timeline in recorded.steps
    for timeline in recorded.steps:
        assert min(row[0].start_s for row in timeline.spans) == 0
        for row, spans in zip(pipe.table.rows, timeline.spans, strict=True):
            assert tuple(span.action for span in spans) == row
            ends = [0.0]
            for span in spans:
                assert ends[-1] <= span.start_s <= span.end_s
                ends.append(span.end_s)
    assert set(recorded.costs.duration_s) == {
        (stage, kind)
        for stage in range(6)
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    } | {(stage, Kind.BACKWARD) for stage in range(6) if has_whole_backward(pipe, stage)}
    assert recorded.peak_held == recorded.predicted.peak_activations
    assert "3 steps measured" in recorded.report()
    assert json.loads(recorded.timeline.trace())["traceEvents"]
    assert "measured" in recorded.timeline.svg(recorded.predicted)


def has_whole_backward(pipe: Pipe, stage: int) -> bool:
    return any(a.kind is Kind.BACKWARD and a.stage == stage for row in pipe.table.rows for a in row)


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1)])
def test_a_recording_has_the_runs_of_its_block(replicas: tuple[int, ...]) -> None:
    def batches(count: int) -> list[tuple[Tensor, Tensor]]:
        inputs, target = example()
        return [(inputs[:4], target[:4])] * count

    descent: Any = Descent
    schedule = SchedulePipeDream(replicas=replicas)
    stages = [
        nn.Linear(4 if stage == 0 else WIDTH, WIDTH).double() for stage in range(len(replicas))
    ]
    with Pipe(stages, WORKERS, schedule, mse, optimizer=descent) as pipe:
        with pipe.recording() as recorded:
            for count in (7, 5, 0):
                assert len(list(pipe.run(batches(count)))) == count
            running = pipe.run(batches(40))
            next(running)
            running.close()  # type: ignore[attr-defined]
        assert len(list(pipe.run(batches(3)))) == 3
    assert [each.table for each in recorded.steps] == [schedule.table(3, n) for n in (7, 5)]
    for timeline in recorded.steps:
        for row, spans in zip(timeline.table.rows, timeline.spans, strict=True):
            assert tuple(span.action for span in spans) == row
            ends = [0.0]
            for span in spans:
                assert ends[-1] <= span.start_s <= span.end_s
                ends.append(span.end_s)
    assert {kind for _, kind in recorded.costs.duration_s} == {
        Kind.FORWARD,
        Kind.BACKWARD,
        Kind.UPDATE,
    }
    assert recorded.predicted.table == recorded.timeline.table
    assert recorded.report().startswith("SchedulePipeDream, 2 runs measured")


def test_an_action_begins_after_those_whose_values_it_waits_for() -> None:
    with Pipe(layers(3), WORKERS, Schedule1F1B(4), mse) as pipe, pipe.recording() as recorded:
        pipe.step(*example())
    spans = {span.action: span for row in recorded.timeline.spans for span in row}
    for action, span in spans.items():
        before = [
            each
            for other, each in spans.items()
            if other.microbatch == action.microbatch
            and (
                (other.kind is action.kind is Kind.FORWARD and other.stage < action.stage)
                or (other.kind is action.kind is Kind.BACKWARD and other.stage > action.stage)
                or (other.kind is Kind.FORWARD and action.kind is Kind.BACKWARD)
            )
        ]
        assert all(each.start_s < span.start_s for each in before), action


def test_steps_that_fail_are_left_out() -> None:
    model = [layers(1), Failing(), nn.Linear(WIDTH, WIDTH).double()]
    with Pipe(model, WORKERS, Schedule1F1B(4), mse) as pipe:
        bad = -1e4 * torch.sign(pipe.state_dict()["0.0.weight"][0])
        inputs, target = example()
        with pipe.recording() as recorded:
            pipe.step(inputs, target)
            with pytest.raises(PipelineError, match="stage 1"):
                pipe.step(torch.cat([inputs[:-1], bad[None]]), target)
            pipe.step(inputs, target)
        assert len(recorded.steps) == 2
        with pytest.raises(PipelineError, match="stage 1"), pipe.recording() as recorded:
            pipe.step(torch.cat([inputs[:-1], bad[None]]), target)
        assert not recorded.steps
        with pytest.raises(ConfigurationError, match="no training step was recorded"):
            recorded.report()


def test_two_recordings_at_a_time_are_refused() -> None:
    with Pipe(layers(3), WORKERS, Schedule1F1B(4), mse) as pipe, pipe.recording() as outer:
        with pytest.raises(ConfigurationError, match="leave that block first"):
            pipe.recording().__enter__()
        pipe.step(*example())
    assert len(outer.steps) == 1
