"""Stages run without computing, to see whether they fit each other."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from torchweft.errors import ConfigurationError
from torchweft.pipeline import (
    BATCH,
    StageMismatch,
    Stages,
    Take,
    Wiring,
    check_stages,
    cut_sequential,
)


def chain(*parts: object) -> Stages:
    return Stages(parts, Wiring.chain(len(parts), spreads=True))  # type: ignore[arg-type]


class Fork(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"sum": x.sum(-1)}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, sums: dict[str, Tensor], *, shift: Tensor) -> Tensor:
        return self.linear(x) + sums["sum"][:, None] + shift


class ByValue(nn.Module):
    """The number of rows of its output depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy())


def test_the_shapes_of_each_stage() -> None:
    takes = Wiring.checked(
        [[Take(BATCH, "x")], [Take(0, 0), Take(0, 1), Take(BATCH, "y", "shift")]]
    )
    batch = {"x": torch.ones(6, 3), "y": torch.ones(6, 1)}
    assert check_stages(Stages((Fork(), Join()), takes), batch, 2) == (
        "(float32[3, 3], {'sum': float32[3]})",
        "float32[3, 2]",
    )


def test_a_stage_may_change_a_value_in_place_that_it_alone_takes() -> None:
    found = check_stages(chain(nn.Linear(3, 4), nn.ReLU(inplace=True)), torch.ones(4, 3), 2)
    assert found[1] == "float32[2, 4]"


def test_nothing_is_computed_and_no_stage_is_changed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = list(model.parameters())
    state = torch.get_rng_state()
    check_stages(cut_sequential(model, [2]), torch.ones(4, 3), 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in weights)
    with torch.device("meta"):
        huge = nn.Sequential(nn.Linear(3, 10**9), nn.Linear(10**9, 3))
    assert check_stages(cut_sequential(huge, [1]), torch.ones(2, 3, device="meta")) == (
        "float32[2, 1000000000]",
        "float32[2, 3]",
    )


@pytest.mark.parametrize(
    ("stages", "text", "stage"),
    [
        (
            chain(nn.Linear(3, 4), nn.Linear(4, 8), nn.Linear(7, 2)),
            r"stage 2 cannot take float32\[2, 8\] from stage 1: RuntimeError: ",
            2,
        ),
        (chain(nn.Linear(5, 4)), r"stage 0 cannot take float32\[2, 3\] from the batch", 0),
        (
            Stages((Fork(), Join()), Wiring.checked([[BATCH], [Take(0, 0), BATCH]])),
            r"take float32\[2, 3\] from stage 0 and float32\[2, 3\] from the batch: TypeError",
            1,
        ),
        (chain(Fork(), nn.Linear(3, 3)), r"float32\[2, 3\], float32\[2\] from stage 0: TypeErr", 1),
        (
            Stages(
                (nn.Linear(3, 4), nn.ReLU(inplace=True), Join()),
                Wiring.checked([[BATCH], [0], [0, 1]]),
            ),
            "a leaf Variable .* in-place",
            1,
        ),
    ],
)
def test_a_stage_that_cannot_take_its_values_is_named(
    stages: Stages, text: str, stage: int
) -> None:
    with pytest.raises(StageMismatch, match=text) as caught:
        check_stages(stages, torch.ones(4, 3), 2)
    assert caught.value.stage == stage


class Counter(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x


def test_a_buffer_that_a_stage_changes_cannot_be_in_two_stages() -> None:
    counter = Counter()
    alone = cut_sequential(nn.Sequential(nn.Linear(3, 3), counter), [1])
    assert check_stages(alone, torch.ones(2, 3)) == ("float32[2, 3]", "float32[2, 3]")
    reader = nn.Linear(3, 3)
    reader.register_buffer("seen", counter.calls)
    both = cut_sequential(nn.Sequential(reader, counter), [1])
    with pytest.raises(
        ConfigurationError, match=r"stage 1 changes the buffer '1.calls', of which stage 0 has"
    ):
        check_stages(both, torch.ones(2, 3))
    assert counter.calls == 0


def test_a_part_that_the_output_does_not_have() -> None:
    wiring = Wiring.checked([[BATCH], [Take(0, "hidden")]])
    with pytest.raises(ConfigurationError, match=r"stage 1 takes part 'hidden' .* float32"):
        check_stages(Stages((nn.Linear(3, 3), nn.Linear(3, 3)), wiring), torch.ones(2, 3))


@pytest.mark.parametrize("unknown", [ByValue(), Numpy(), functools.partial(nn.Linear, 3, 3)])
def test_stages_that_cannot_be_run_so_are_left_out(unknown: object) -> None:
    takes = [[BATCH], [0], [1], [0]]
    stages = Stages(
        (nn.Linear(3, 3), unknown, nn.Linear(9, 9), nn.Linear(3, 1)),  # type: ignore[arg-type]
        Wiring(tuple(tuple(map(Take, each)) for each in takes)),
    )
    assert check_stages(stages, torch.ones(2, 3)) == (
        "float32[2, 3]",
        "unknown",
        "unknown",
        "float32[2, 1]",
    )
