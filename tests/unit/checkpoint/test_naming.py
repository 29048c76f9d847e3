from __future__ import annotations

import torch
from torch import nn

from torchweft.checkpoint.naming import parameter_names


class Holder:
    """Something that is no module, with parameters that have names."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def named_parameters(self) -> object:
        return self._module.named_parameters()


def test_parameters_are_called_as_in_the_state() -> None:
    first, second, alone = nn.Linear(1, 1), nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    items = {"a/b": nn.Sequential(first), "c": Holder(second), "w": alone, "n": 3}
    parameters = {4: first.bias, 2: second.weight, 7: alone, 1: nn.Parameter(torch.ones(1))}
    assert parameter_names(items, parameters) == {
        4: "a/b:0.bias",
        2: "c:weight",
        7: "w",
        1: "#1",
    }


def test_one_that_is_in_two_entries_has_the_name_in_the_first() -> None:
    layer = nn.Linear(1, 1)
    items = {"z": layer, "a": nn.Sequential(layer)}
    assert parameter_names(items, {0: layer.weight}) == {0: "z:weight"}
