"""Models cut at named points, on real workers, compared with one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes.pipeline_decoder import Decoder, token_loss
from torchweft.errors import ConfigurationError
from torchweft.launch import Nursery
from torchweft.pipeline import (
    Pipe,
    Schedule1F1B,
    ScheduleZBH1,
    ScheduleZBVZeroBubble,
    SplitPoint,
    StageMismatch,
    cut_by_plan,
    cut_model,
)
from torchweft.pipeline.partition import Plan

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1", "worker2"]
TINY = 1e-12
POINTS = {
    "model.layers.1": SplitPoint.BEGINNING,
    "model.layers.2.attention": SplitPoint.END,  # Between the two layers of a residual block.
}


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=3, nursery=nursery):
        yield


def text(rows: int, length: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(13, (rows, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[::2, 0] = 0
    return {"tokens": tokens, "attention_mask": mask}, tokens.roll(-1, 1)


def compare_gradients(pipe: Pipe, alone: nn.Module) -> None:
    found = pipe.gradients()
    for name, weight in alone.named_parameters(remove_duplicate=False):
        assert weight.grad is not None
        assert (found[name] - weight.grad).abs().max() < TINY, name


@pytest.mark.parametrize(
    ("schedule", "points", "count"),
    [
        (Schedule1F1B(4), POINTS, 3),
        (ScheduleZBH1(4), POINTS, 3),
        # The first worker has the first stage and the last, with both of the tied weights.
        (ScheduleZBVZeroBubble(4), POINTS | {"model.layers.3.norm2": SplitPoint.BEGINNING}, 2),
    ],
    ids=["1F1B", "ZBH1", "ZBV"],
)
def test_a_decoder_trains_as_in_one_process(schedule: Any, points: Any, count: int) -> None:
    model = Decoder()
    alone = copy.deepcopy(model)
    own = torch.optim.SGD(alone.parameters(), lr=0.1)
    stages = cut_model(model, points, (), text(2, 3)[0])
    with Pipe(
        stages,
        WORKERS[:count],
        schedule,
        token_loss,
        checkpoint="except_last",
        example=text(8, 5)[0],
    ) as pipe:
        assert pipe.state_dict().keys() == model.state_dict().keys()
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        for step, length in enumerate((5, 3)):
            batch, target = text(8, length, step)
            own.zero_grad()
            expected = token_loss(alone(**batch), target)
            expected.backward()
            optimizer.zero_grad()
            assert pipe.step(batch, target).item() == pytest.approx(expected.item(), abs=TINY)
            compare_gradients(pipe, alone)
            own.step()
            optimizer.step()
        found = pipe(batch)
        assert (found["logits"] - alone(**batch)["logits"]).abs().max() < TINY
        pipe.load_state_dict(model.state_dict())
        assert torch.equal(pipe.state_dict()["head.weight"], model.head.weight)
    assert torch.equal(model.head.weight, Decoder().head.weight)


def test_dropout_of_a_traced_block_follows_the_mode_of_the_pipeline() -> None:
    model = Decoder()
    for layer in model.model.layers:
        layer.dropout = 0.5
    batch, _ = text(4, 5)
    with Pipe(cut_model(model, POINTS, (), batch), WORKERS, Schedule1F1B(2)) as pipe:
        trained = pipe(batch)["logits"]
        pipe.eval()
        found = pipe(batch)["logits"]
    expected = copy.deepcopy(model).eval()(**batch)["logits"]
    assert (found - expected).abs().max() < TINY
    assert (trained - expected).abs().max() > 1e-3


def test_an_example_that_does_not_fit_is_refused_before_anything_is_placed() -> None:
    stages = [nn.Linear(4, 6), nn.Linear(5, 6)]
    with pytest.raises(StageMismatch, match=r"stage 1 cannot take float32\[3, 6\] from stage 0"):
        Pipe(stages, WORKERS[:2], Schedule1F1B(2), example=torch.zeros(6, 4))
    with pytest.raises(ConfigurationError, match="7 rows, which cannot be cut into 2"):
        Pipe(stages, WORKERS[:2], Schedule1F1B(2), example=torch.zeros(7, 4))


def test_a_plan_becomes_stages() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]).double()
    plan = Plan.manual([1, 3], n_layers=5)
    inputs = torch.randn(4, 4, dtype=torch.float64)
    with Pipe(cut_by_plan(model, plan), WORKERS, Schedule1F1B(2)) as pipe:
        assert (pipe(inputs) - model(inputs)).abs().max() < TINY
