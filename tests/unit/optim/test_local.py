"""Tests the local optimizer of an owner, with made-up gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.optim.references import reference
from torchweft.engine.threads.device_streams import new_guard
from torchweft.optim.local import GroupPart, LocalOptimizer, Saved


def part(group: int, numbers: list[int], parameters: list[Tensor], **options: Any) -> GroupPart:
    held = [reference(0, number, value) for number, value in zip(numbers, parameters, strict=True)]
    return GroupPart(group, options, numbers, held)


def make(*parts: GroupPart, kind: Any = torch.optim.SGD, **options: Any) -> LocalOptimizer:
    return LocalOptimizer(lambda groups: kind(groups, **options), parts, new_guard())


def ones(count: int) -> list[Tensor]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def test_a_step_uses_the_gradients_given_and_leaves_grad_alone() -> None:
    with_grad, without, not_stepped = parameters = ones(3)
    mine = with_grad.grad = torch.full((2,), 5.0)
    not_stepped_grad = not_stepped.grad = torch.full((2,), 5.0)
    optimizer = make(part(0, [0, 1, 2], parameters), lr=1.0)
    optimizer.step({with_grad: torch.full((2,), 0.25), without: torch.full((2,), 0.5)}, {})
    assert [parameter[0].item() for parameter in parameters] == [0.75, 0.5, 1.0]
    assert with_grad.grad is mine
    assert without.grad is None
    assert not_stepped.grad is not_stepped_grad
    assert mine.tolist() == [5.0, 5.0]


def test_grad_is_as_before_also_after_a_step_that_failed() -> None:
    parameter = ones(1)[0]
    mine = parameter.grad = torch.full((2,), 5.0)
    optimizer = make(part(0, [0], [parameter]), kind=torch.optim.Adam)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step({parameter: torch.ones(2).to_sparse()}, {})
    assert parameter.grad is mine


def test_changes_of_hyper_parameters_go_to_their_group() -> None:
    first, second = ones(2)
    optimizer = make(part(4, [0], [first]), part(7, [1], [second]), lr=1.0)
    gradients = {first: torch.full((2,), 0.25), second: torch.full((2,), 0.25)}
    optimizer.step(gradients, {7: {"lr": 2.0}})
    assert (first[0].item(), second[0].item()) == (0.75, 0.5)
    optimizer.add([part(9, [2], ones(1), lr=3.0)])
    rates = {group: options["lr"] for group, options in optimizer.save({4: {"lr": 9.0}})[0].items()}
    assert rates == {4: 9.0, 7: 2.0, 9: 3.0}


def test_state_goes_by_the_numbers_of_the_parameters() -> None:
    parameters = ones(3)
    optimizer = make(
        part(0, [5, 3], parameters[:2]), part(1, [8], [parameters[2]]), lr=0.1, momentum=0.9
    )
    optimizer.step({p: torch.full((2,), float(i)) for i, p in enumerate(parameters)}, {})
    saved = optimizer.save({})
    moments = {number: state["momentum_buffer"][0].item() for number, state in saved.state.items()}
    assert moments == {5: 0.0, 3: 1.0, 8: 2.0}
    other = make(part(1, [8], ones(1)), part(0, [3], ones(1)), lr=7.0, momentum=0.0)
    other.load(Saved(saved.options, {key: saved.state[key] for key in (3, 8)}))
    again = other.save({})
    assert again.options == saved.options
    assert again.state[3]["momentum_buffer"].tolist() == [1.0, 1.0]
    assert again.state[8]["momentum_buffer"] is not saved.state[8]["momentum_buffer"]


def test_loaded_options_go_to_the_devices_of_the_present_ones() -> None:
    parameter = nn.Parameter(torch.ones(2))
    part = GroupPart(0, {"lr": torch.tensor(0.5)}, [0], [reference(0, 0, parameter)])
    local = LocalOptimizer(torch.optim.SGD, [part], new_guard())
    saved = local.save({})
    local._optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    local.load(saved)
    assert local._optimizer.param_groups[0]["lr"].device.type == "meta"
