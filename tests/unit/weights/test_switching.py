"""The change of a module from one version to another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torchweft.weights import WeightsMismatch
from torchweft.weights.layout import prepare, tensors_of


def model_and_values() -> tuple[nn.Module, dict[str, Tensor]]:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    return model, {name: each.detach() + 1 for name, each in tensors_of(model).items()}


@pytest.mark.parametrize("in_place", [False, True])
def test_parameters_are_swapped_and_buffers_copied(in_place: bool) -> None:
    model, values = model_and_values()
    before = {name: each.data_ptr() for name, each in tensors_of(model).items()}
    assert prepare(tensors_of(model), values, in_place=in_place).run() is None
    for name, target in tensors_of(model).items():
        assert torch.equal(target, values[name])
        is_swapped = isinstance(target, nn.Parameter) and not in_place
        expected = values[name].data_ptr() if is_swapped else before[name]
        assert target.data_ptr() == expected, name


@pytest.mark.parametrize("updates_so", [False, True])
def test_a_module_that_was_made_in_inference_mode(updates_so: bool) -> None:
    with torch.inference_mode():
        model, values = model_and_values()
        model.eval()
    values = {name: torch.ones(each.shape, dtype=each.dtype) for name, each in values.items()}
    with torch.inference_mode(updates_so):
        assert prepare(tensors_of(model), values, in_place=False).run() is None
    with torch.inference_mode():
        assert torch.allclose(model(torch.ones(5, 3)), torch.tensor(3 / (1 + 1e-5) ** 0.5 + 1))
    for name, target in tensors_of(model).items():
        assert torch.equal(target, values[name])


def test_one_tensor_of_two_names_gets_one_value() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model[1].weight = model[0].weight
    values = {"0.weight": torch.full((2, 2), torch.nan), "1.weight": torch.full((2, 2), torch.nan)}
    prepare(tensors_of(model), values, in_place=False).run()
    assert model[0].weight.data_ptr() == values["0.weight"].data_ptr()
    values["1.weight"] = torch.ones(2, 2)
    with pytest.raises(
        WeightsMismatch, match=r"'0.weight' and '1.weight' are one tensor"
    ) as caught:
        prepare(tensors_of(model), values, in_place=False)
    assert caught.value.tensor == "1.weight"


def test_an_interrupt_leaves_no_state_half_way() -> None:
    model, values = model_and_values()
    switch = prepare(tensors_of(model), values, in_place=False)
    interrupts = [KeyboardInterrupt()]

    class Interrupting(list):  # type: ignore[type-arg]
        def __iter__(self):  # type: ignore[no-untyped-def]
            for place, each in enumerate(super().__iter__()):
                if place == 1 and interrupts:
                    raise interrupts.pop()
                yield each

    found = switch._replace(swaps=Interrupting(switch.swaps)).run()
    assert isinstance(found, KeyboardInterrupt)
    for name, target in tensors_of(model).items():
        assert torch.equal(target, values[name])
