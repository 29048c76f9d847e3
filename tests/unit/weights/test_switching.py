"""The change of a module from one version to another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torchweft.weights.layout import tensors_of
from torchweft.weights.switching import prepare


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
