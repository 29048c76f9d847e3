"""Versions of a stage's weights, compared with a list of all versions."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from torchweft.pipeline.schedules import Kind, SchedulePipeDream, versions_of
from torchweft.pipeline.streaming import WeightVersions

RULES = ["stashing", "vertical-sync", "2bw"]
MANY = 40
"""So many that a worker holds as many versions as it ever does."""


def memory(versions: WeightVersions, module: nn.Module) -> int:
    """Returns how many different memories the versions of a module's weight have."""
    leaves = [each["weight"] for each in versions._leaves.values()]
    return len({each.data_ptr() for each in (*leaves, module.get_parameter("weight"))})


def decay(weight: Tensor) -> None:
    weight.data.mul_(0.9).add_(0.01)


@given(
    weights=st.sampled_from(RULES),
    replicas=st.lists(st.integers(1, 2), min_size=1, max_size=4),
    n_minibatches=st.one_of(st.integers(2, 12), st.just(MANY)),
)
def test_each_minibatch_finds_its_version_forward_and_backward(
    weights: str, replicas: list[int], n_minibatches: int
) -> None:
    schedule = SchedulePipeDream(weights=weights, replicas=tuple(replicas))
    n_workers = sum(replicas)
    table = schedule.table(n_workers, n_minibatches)
    expected = versions_of(table)
    for row, actions in enumerate(table.rows):
        module = nn.Linear(1, 1, bias=False).double()
        weight = module.weight
        versions = WeightVersions(module)
        values = [weight.item()]  # of each version
        outputs: dict[int, Tensor] = {}
        total = 0.0
        most = 1
        n_filling = len(schedule.rows(n_workers, 0, n_minibatches)[row])
        for place, action in enumerate(actions):
            if place == n_filling:
                versions.want(math.inf)
            stage, b = action.stage, action.microbatch
            if action.kind is Kind.FORWARD:
                used = schedule.version_used(stage, b, n_workers)
                leaves = versions.begin(b, used)
                versions.want(schedule.version_used(stage, b + replicas[stage], n_workers))
                # The gradient needs the weight of the forward: d(w * w * x) / dw = 2 w x.
                inputs = torch.tensor([b + 1.0], dtype=torch.float64)
                once = functional_call(module, dict(leaves), (inputs,))
                outputs[b] = functional_call(module, dict(leaves), (once,))
                assert outputs[b].item() == pytest.approx(values[used] ** 2 * (b + 1))
                assert used == expected.used[stage, b]
            elif action.kind is Kind.BACKWARD:
                outputs.pop(b).backward()
                versions.end(b)
                total += 2 * values[expected.used[stage, b]] * (b + 1)
                assert weight.grad is not None
                assert weight.grad.item() == pytest.approx(total)
            else:
                assert (weight.grad is None) == (total == 0.0)
                versions.update(functools.partial(decay, weight))
                values.append(values[-1] * 0.9 + 0.01)
                total = 0.0
                assert weight.grad is None
            assert weight.item() == pytest.approx(values[-1])
            most = max(most, memory(versions, module))
        assert versions.peak == most
        # Until then a further minibatch may come, for which a version is kept.
        held = versions_of(schedule.table(n_workers, MANY)).held[row]
        assert versions.peak == held if n_minibatches == MANY else versions.peak <= held


def test_the_last_stage_copies_nothing() -> None:
    module = nn.Linear(2, 2)
    versions = WeightVersions(module)
    pointers = [each.data_ptr() for each in module.parameters()]
    for b in range(5):
        output = functional_call(module, dict(versions.begin(b, b)), (torch.ones(3, 2),))
        versions.want(b + 1)
        output.sum().backward()
        versions.end(b)
        versions.update(lambda: None)
        assert [each.data_ptr() for each in module.parameters()] == pointers
    assert versions.peak == 1


def test_leaves_share_the_memory_of_the_weights_until_an_update_needs_other_memory() -> None:
    module = nn.Linear(2, 2)
    weight = module.weight
    versions = WeightVersions(module)
    leaves = versions.begin(0, 0)
    assert leaves["weight"].data_ptr() == weight.data_ptr()
    before = weight.detach().clone()
    versions.update(functools.partial(decay, weight))
    assert module.weight is weight
    assert leaves["weight"].data_ptr() != weight.data_ptr()
    assert torch.equal(leaves["weight"], before)
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_and_frozen_weights(kind: Any) -> None:
    torch.manual_seed(0)
    module = kind(3, 4)
    module.bias_ih_l0.requires_grad_(False)
    versions = WeightVersions(module)
    trained = [each for each in module.parameters() if each.requires_grad]
    inputs = torch.randn(5, 2, 3)
    expected = torch.autograd.grad(module(inputs)[0].sum(), module.weight_hh_l0)[0]
    leaves = versions.begin(0, 0)
    assert "bias_ih_l0" not in leaves
    output = functional_call(module, dict(leaves), (inputs,))[0].sum()
    versions.want(0)
    with torch.no_grad():
        versions.update(lambda: [each.mul_(2) for each in trained])
    output.backward()
    versions.end(0)
    assert torch.equal(module.weight_hh_l0.grad, expected)
    again = functional_call(module, dict(versions.begin(1, 1)), (inputs,))[0].sum()
    assert torch.equal(again, module(inputs)[0].sum())
    assert not torch.equal(again, output)
