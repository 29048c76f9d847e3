"""Values that become NaN or infinite in a stage of a pipeline, which the error names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes.pipeline_models import Descent
from torchweft.launch import Nursery
from torchweft.pipeline import (
    NotFinite,
    Pipe,
    Schedule1F1B,
    ScheduleGPipe,
    SchedulePipeDream,
    ScheduleZBH1,
)

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1", "worker2"]
WIDTH = 4
MARK = 100.0
"""Far above the other features. A stage or loss makes a NaN or an infinity of it."""
mse = nn.functional.mse_loss
DESCENT: Any = Descent


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=3, nursery=nursery):
        yield


class BadBackward(torch.autograd.Function):
    """Passes a value on; where it is marked, its gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return gradients[0].masked_fill(value >= MARK / 2, math.nan)


class Spoiling(nn.Module):
    """A stage that makes marked features NaN in its forward, or their gradients in its backward.

    Args:
        where: ``"forward"``, ``"backward"`` or ``"weight"``, in which only the gradient of its own
            weight is bad.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.where == "forward":
            return inputs.masked_fill(inputs >= MARK / 2, math.nan) + self.weight
        if self.where == "backward":
            return BadBackward.apply(inputs + self.weight)  # type: ignore[no-any-return]
        marked = inputs.detach() * (inputs.detach() >= MARK / 2)
        return inputs + BadBackward.apply(self.weight + marked) - marked


def spoiled_loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns a loss that is infinite where the target is marked."""
    return mse(output, target.where(target < MARK / 2, math.inf))


class Masking(nn.Module):
    """A stage whose output has a mask with infinities."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, torch.full_like(inputs, -math.inf)


class Masked(nn.Module):
    """A stage that uses a mask."""

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        return inputs + mask.exp()


class Adding(nn.Module):
    """A stage that adds a mask where it should not."""

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        return inputs + mask


def rows(count: int, marked: int | None = None) -> Tensor:
    """Returns ones; in one row, the first feature is marked."""
    found = torch.ones(count, WIDTH)
    if marked is not None:
        found[marked, 0] = MARK
    return found


def stages(where: str, stage: int) -> list[nn.Module]:
    made: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    for each in made:
        nn.init.eye_(each.weight)  # type: ignore[arg-type]
        nn.init.zeros_(each.bias)  # type: ignore[arg-type]
    made[stage] = Spoiling(where)
    return made


SCHEDULES: list[Any] = [Schedule1F1B(4), ScheduleZBH1(4), SchedulePipeDream()]
# Where a NaN is made, at which stage; the action and the value that the error names.
FOUND = [
    ("forward", 1, "forward", "output for stage 2"),
    ("forward", 2, "forward", "output"),
    ("backward", 1, "backward", "gradient for stage 0"),
    ("weight", 0, "", "gradient of weight 'weight'"),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["1f1b", "zbh1", "pipedream"])
@pytest.mark.parametrize(("where", "stage", "action", "value"), FOUND)
def test_the_stage_that_makes_a_nan_is_named(
    schedule: Any, where: str, stage: int, action: str, value: str
) -> None:
    is_endless = isinstance(schedule, SchedulePipeDream)
    made, optimizer = stages(where, stage), DESCENT if is_endless else None
    pipe = Pipe(made, WORKERS, schedule, mse, optimizer=optimizer, check_finite=True)

    def train(marked: int | None) -> list[Tensor]:
        """Trains on four micro-batches or minibatches of one row each."""
        batch = rows(4, marked)
        if is_endless:
            return list(pipe.run([(each, 0.9 * each) for each in batch.split(1)]))
        pipe.optimizer(DESCENT).zero_grad()
        return [pipe.step(batch, 0.9 * batch)]

    with pipe:
        assert all(loss.isfinite() for loss in train(None))
        with pytest.raises(NotFinite, match=f"stage {stage} on worker 'worker{stage}'") as caught:
            train(2)
        error = caught.value
        assert (error.stage, error.worker, error.value) == (stage, f"worker{stage}", value)
        assert (error.n_nan, error.n_infinite) == (1, 0)
        if where == "weight":  # The gradients of a step are checked together.
            expected = (2, "update") if is_endless else (-1, "backward")
        elif action == "backward" and isinstance(schedule, ScheduleZBH1):
            expected = (2, "backward to the inputs")
        else:
            expected = (2, action)
        assert (error.microbatch, error.action) == expected
        assert all(loss.isfinite() for loss in train(None))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_loss_is_told_from_an_output(checkpoint: Any) -> None:
    with Pipe(
        stages("forward", 0),
        WORKERS,
        ScheduleGPipe(2),
        spoiled_loss,
        checkpoint=checkpoint,
        check_finite=True,
    ) as pipe:
        with pytest.raises(NotFinite, match="its loss has 0 NaN and 1 infinite of 1 elements") as c:
            pipe.step(rows(4), rows(4, marked=3))
        assert (c.value.stage, c.value.microbatch, c.value.value) == (2, 1, "loss")
        assert pipe.step(rows(4), rows(4)).isfinite()


def test_a_batch_and_weights_that_are_bad_already() -> None:
    with Pipe(stages("forward", 1), WORKERS, Schedule1F1B(2), mse, check_finite=True) as pipe:
        batch = rows(4)
        batch[0] = math.nan
        with pytest.raises(NotFinite, match="its input from the batch has 4 NaN") as caught:
            pipe.step(batch, rows(4))
        assert (caught.value.stage, caught.value.microbatch) == (0, 0)
        state = pipe.state_dict()
        pipe.load_state_dict(state | {"2.bias": torch.full((WIDTH,), math.inf)})
        with pytest.raises(NotFinite, match="its weight 'bias' has 0 NaN and 4 infinite of 4"):
            pipe.step(rows(4), rows(4))
        pipe.load_state_dict(state)
        assert pipe.step(rows(4), rows(4)).isfinite()


def test_infinities_of_a_mask_may_pass_unless_they_spoil_a_result() -> None:
    parts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), Masking(), Masked()]
    with Pipe(parts, WORKERS, Schedule1F1B(2), mse, check_finite=True) as pipe:
        assert pipe.step(rows(4), rows(4)).isfinite()
    parts[2] = Adding()
    with (
        Pipe(parts, WORKERS, Schedule1F1B(2), mse, check_finite=True) as pipe,
        pytest.raises(NotFinite, match="with them, the output of stage 2 has 0 NaN") as caught,
    ):
        pipe.step(rows(4), rows(4))
    assert (caught.value.stage, caught.value.worker) == (1, "worker1")
    assert caught.value.value == "output for stage 2"


def test_a_replica_is_named() -> None:
    made = stages("weight", 0)[:2]
    schedule = SchedulePipeDream(replicas=(2, 1))
    batches = [(each, torch.zeros(1, WIDTH)) for each in rows(6, 3).split(1)]
    with (
        Pipe(made, WORKERS, schedule, mse, optimizer=DESCENT, check_finite=True) as pipe,
        pytest.raises(NotFinite) as caught,
    ):
        list(pipe.run(batches))
    assert (caught.value.stage, caught.value.worker) == (0, "worker1")


def test_without_the_check_nothing_is_refused() -> None:
    with Pipe(stages("forward", 1), WORKERS, Schedule1F1B(4), mse) as pipe:
        assert pipe.step(rows(4, 2), rows(4)).isnan()
