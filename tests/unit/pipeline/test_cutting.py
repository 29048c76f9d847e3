"""Tests cuts of a Sequential, stages, and checks that they fit each other."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.pipeline import (
    BATCH,
    ScheduleGPipe,
    SplitPoint,
    StageMismatch,
    Stages,
    Take,
    Wiring,
    check_stages,
    cut_by_plan,
    cut_evenly,
    cut_model,
    cut_sequential,
)
from torchweft.pipeline.cutting import find_ties
from torchweft.pipeline.partition import LayerProfile, Plan, Profile


def model(*widths: int) -> nn.Sequential:
    named = nn.Sequential()
    for number, width in enumerate(widths or (2, 2, 2, 2)):
        named.add_module(f"layer{number}", nn.Linear(2, width))
    named.layer1 = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    return named


def children(stages: Stages) -> list[list[str]]:
    return [list(source._modules) for source in stages.sources if isinstance(source, nn.Module)]


def test_children_are_named_or_counted() -> None:
    expected = [["layer0"], ["layer1", "layer2"], ["layer3"]]
    assert children(cut_sequential(model(), ["layer1", "layer3"])) == expected
    assert children(cut_sequential(model(), [1, "layer3"])) == expected
    # Children of a Sequential without names have numbers as names.
    unnamed = nn.Sequential(*model())
    assert children(cut_sequential(unnamed, ["2"])) == children(cut_sequential(unnamed, [2]))
    assert all(not source.training for source in cut_sequential(model().eval(), [1]).sources)


@pytest.mark.parametrize(
    ("cuts", "text"),
    [
        (["layer1.1"], "inside of the child 'layer1', a Sequential: .* pass the name to cut_model"),
        (["layer4"], "no child 'layer4'; did you mean 'layer"),
        (["layer0"], "do not cut 4 layers into stages of at least one layer"),
        (["layer2", "layer1"], "do not cut 4 layers"),
        ([1.5], "a cut is 1.5, a float; pass an integer"),
    ],
)
def test_cuts_that_make_no_stages(cuts: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        cut_sequential(model(), cuts)


def test_a_number_of_stages_balances_weights_or_measured_times() -> None:
    wide = nn.Sequential(nn.Linear(2, 90), nn.Linear(90, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    assert children(cut_evenly(wide, 2)) == children(cut_model(wide, 2)) == [["0"], ["1", "2", "3"]]
    times = Profile(tuple(LayerProfile("x", t, t, 8, 8, 8) for t in (1.0, 1.0, 2.0, 4.0)), 1)
    assert children(cut_model(wide, 2, profile=times)) == [["0", "1", "2"], ["3"]]
    with pytest.raises(ConfigurationError, match="the profile has 4 layers, and the model 3"):
        cut_evenly(wide[:3], 2, times)
    with pytest.raises(ConfigurationError, match="profile is for a number of stages"):
        cut_model(wide, {}, profile=times)


def test_a_plan_that_model_or_schedule_do_not_have() -> None:
    replicated = Plan.manual([3], [2, 1], n_layers=4)
    with pytest.raises(
        ConfigurationError, match=r"Schedule1F1B\(..., replicas=\(2, 1\)\).table\(3"
    ):
        cut_by_plan(model(), replicated)
    with pytest.raises(ConfigurationError, match=r"plan 2-1 has \[2, 1\] .* has \[1, 1, 1\]"):
        cut_by_plan(model(), replicated, ScheduleGPipe(4).table(3))
    with pytest.raises(ConfigurationError, match="the plan has 5 layers, and the model 4"):
        cut_by_plan(model(), Plan.manual([3], n_layers=5))
    with pytest.raises(ArgumentTypeError, match=r"model is a Linear; pass the nn.Sequential"):
        cut_by_plan(nn.Linear(2, 2), Plan.manual([], n_layers=1))  # type: ignore[arg-type]


# Weights and buffers of several stages


def test_updated_buffers_cannot_be_shared() -> None:
    shared = nn.BatchNorm1d(2)
    parts = nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared)
    with pytest.raises(ConfigurationError, match="stages 0 and 1 share the running statistics"):
        cut_sequential(parts, [2])
    assert find_ties([nn.Sequential(shared), None, nn.Linear(2, 2)]) == ()
    assert len(cut_sequential(parts, [1]).ties) == 0  # Both uses are in one stage.
    shared.eval()
    assert cut_sequential(parts, [2]).ties == (
        ((0, "1.weight"), (1, "3.weight")),
        ((0, "1.bias"), (1, "3.bias")),
    )
    constant = nn.Module()
    constant.register_buffer("table", torch.ones(2))
    assert find_ties([constant, constant]) == ()


# Text


def test_a_table_of_the_stages() -> None:
    tied = model()
    tied.layer3.weight = tied.layer0.weight
    stages = cut_sequential(tied, [1, 3])
    assert str(stages).splitlines() == [
        "stage  parts           weights  bytes  takes",
        "    0  layer0                6   24 B  all from the batch",
        "    1  layer1, layer2       12   48 B  all from stage 0",
        "    2  layer3                6   24 B  all from stage 1",
        "tied: layer0.weight of stage 0, layer3.weight of stage 2",
    ]
    assert str(cut_model(tied, {"layer1.0": SplitPoint.END})).splitlines()[1:3] == [
        "    0  layer0, layer1.0               12   48 B  all from the batch",
        "    1  layer1.1, layer2, layer3       12   48 B  layer1_0 from stage 0",
    ]


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


def test_a_part_that_the_output_does_not_have() -> None:
    wiring = Wiring.checked([[BATCH], [Take(0, "hidden")]])
    with pytest.raises(ConfigurationError, match=r"stage 1 takes part 'hidden' .* float32"):
        check_stages(Stages((nn.Linear(3, 3), nn.Linear(3, 3)), wiring), torch.ones(2, 3))
