"""Random models with skips, weights used twice and residual blocks, cut at random points."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.thorough import share
from tests.unit.pipeline.stages_alone import compare
from torchweft.pipeline import CutError, SplitPoint, cut_model

WIDTH = 4


class Inner(nn.Module):
    """A layer with code that cannot be traced, but need not be."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        if bool((inputs > 1e6).any()):
            raise ArithmeticError("too large")
        return torch.tanh(self.linear(inputs))


class Residual(nn.Module):
    """Two layers with a skip around each, and a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        hidden = inputs + self.first(inputs) * positions
        return hidden + self.second(hidden) * self.gain, hidden.mean(0, keepdim=True)


class Net(nn.Module):
    """Operations on earlier values, drawn at random.

    Args:
        seed: Of the draw.
        length: How many operations.
    """

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.plain = nn.ModuleList(Inner() for _ in range(length))
        self.blocks = nn.ModuleList(Residual() for _ in range(length))
        self.shared = Inner()
        self.gains = nn.Parameter(torch.randn(length, WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.plan: list[tuple[str, int, int]] = []
        kinds = ["plain", "plain", "block", "block", "add", "gain", "shared", "rows", "shift"]
        for number in range(length):
            # Recent values are likelier, so that the model is deep.
            near, far = max(0, number - draw.randrange(3)), draw.randrange(number + 1)
            self.plan.append((draw.choice(kinds), near, far))
        for pair in range(0, length - 1, 3):
            self.plain[pair].linear.weight = self.plain[pair + 1].linear.weight

    def forward(self, inputs: Tensor, positions: Tensor) -> dict[str, Any]:
        values, used = [inputs], set()
        extra = []
        for number, (kind, near, far) in enumerate(self.plan):
            value = values[near]
            used.add(near)
            if kind == "plain":
                value = self.plain[number](value)
            elif kind == "block":
                value, mean = self.blocks[number](value, positions)
                extra.append(mean)
            elif kind == "add":
                value = value + values[far].cos()
                used.add(far)
            elif kind == "gain":
                value = value * self.gains[number]
            elif kind == "shared":
                value = self.shared(value)
            elif kind == "rows":
                value = value / value.shape[0] + torch.arange(value.shape[0])[:, None]
            else:
                value = value + self.shift
            values.append(value)
        ends = [value for number, value in enumerate(values) if number not in used]
        total = sum(ends) + sum(each.sum() for each in extra)
        return {"total": total, "rows": inputs.shape[0]}


def draw_points(net: Net, draw: random.Random, count: int) -> dict[str, SplitPoint]:
    called = [(kind, number) for number, (kind, _, _) in enumerate(net.plan)]
    names = [f"plain.{number}" for kind, number in called if kind == "plain"]
    for kind, number in called:
        if kind == "block":
            names += [f"blocks.{number}{each}" for each in ("", ".first", ".second")]
    chosen = draw.sample(names, min(count, len(names)))
    return {name: draw.choice(list(SplitPoint)) for name in chosen}


def loss(output: dict[str, Any]) -> Tensor:
    return output["total"].square().mean() / output["rows"]


@pytest.mark.parametrize("seed", range(share(250)))
def test_stages_of_a_random_model_compute_what_it_computes(seed: int) -> None:
    draw = random.Random(1000 + seed)
    net = Net(seed, draw.randrange(4, 14)).double()
    inputs = torch.randn(3, WIDTH, dtype=torch.float64)
    positions = torch.randn(3, 1, dtype=torch.float64)
    points = draw_points(net, draw, draw.randrange(1, 6))
    while True:
        try:
            # The example has another number of rows than the batches.
            stages = cut_model(net, points, (inputs[:2], positions[:2]))
            break
        except CutError as error:
            # Two cuts, or a cut and an end, are in one place: leave out the one that is named.
            if "makes an empty stage" not in str(error):
                raise
            del points[error.module]
    assert len(stages.sources) == len(points) + 1
    for rows in (3, 1):
        batch = inputs[:rows], positions[:rows]
        compare(stages, net, batch, net(*batch), loss)


def test_the_random_models_have_all_kinds_of_cuts() -> None:
    """Guards the test above: skips over a stage, ties, cuts in residual blocks and inputs."""
    seen: set[str] = set()
    wanted = {"2 stages", "4 stages", "inside", "skip", "tie", "late input"}
    for seed in range(25):
        if seen >= wanted:
            break
        draw = random.Random(1000 + seed)
        net = Net(seed, draw.randrange(4, 14))
        points = draw_points(net, draw, draw.randrange(1, 6))
        try:
            stages = cut_model(net, points)
        except CutError:
            continue
        wiring = stages.wiring
        seen.add(f"{len(stages.sources)} stages")
        seen.update("inside" for name in points if name.count(".") == 2)
        seen.update("skip" for source, stage in wiring.edges if stage - source > 1)
        seen.update("tie" for _ in stages.ties)
        seen.update(
            "late input" for stage in range(1, len(wiring.takes)) if wiring.taken(stage, -1)
        )
    assert seen >= wanted
