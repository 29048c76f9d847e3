"""Cuts of a Sequential, weights that stages share, and stages as text."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.pipeline import (
    BATCH,
    CutError,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    Stages,
    Take,
    Wiring,
    cut_by_plan,
    cut_evenly,
    cut_model,
    cut_sequential,
)
from torchweft.pipeline.copies import separated
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


def test_a_plan_gives_the_cuts() -> None:
    made = cut_by_plan(model(), Plan.manual([1, 3], n_layers=4), Schedule1F1B(4).table(3))
    assert children(made) == [["layer0"], ["layer1", "layer2"], ["layer3"]]
    replicated = Plan.manual([3], [2, 1], n_layers=4)
    table = Schedule1F1B(4, replicas=(2, 1)).table(3)
    assert children(cut_by_plan(model(), replicated, table)) == [
        ["layer0", "layer1", "layer2"],
        ["layer3"],
    ]


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


def test_stages_of_one_worker_have_copies_of_their_own() -> None:
    first, second, third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    make = functools.partial(nn.Linear, 2, 2)
    found = separated({0: first, 1: second, 2: third, 3: make})
    assert found[0] is first
    assert found[2] is third
    assert found[3] is make
    apart = found[1]
    assert isinstance(apart, nn.Linear)
    assert apart.weight is not first.weight
    assert torch.equal(apart.weight, first.weight)


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


def test_the_values_that_a_stage_takes_as_text() -> None:
    wiring = Wiring.checked(
        [[Take(BATCH, "x"), Take(BATCH, "y")], [0], [Take(0, 1), 1, Take(BATCH, "y", "mask")]]
    )
    assert [wiring.text(stage) for stage in range(3)] == [
        "x, y from the batch",
        "all from stage 0",
        "1 from stage 0; all from stage 1; y from the batch",
    ]
    lazy = Stages((nn.LazyLinear(2), model, nn.Linear(2, 2)), Wiring.chain(3, spreads=True))
    assert [line.split()[1:3] for line in str(lazy).splitlines()[1:]] == [
        ["LazyLinear", "?"],
        ["model()", "?"],
        ["Linear", "6"],
    ]


def test_errors_have_fields() -> None:
    with pytest.raises(CutError) as caught:
        cut_sequential(model(), ["layer1.0"])
    assert caught.value.module == "layer1.0"
