"""Tests flattening trees: which branches stay one object, and the paths of leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.mapreduce import trees
from torchweft.mapreduce.trees import module_clone


def test_a_branch_without_anything_of_a_kind_stays_one_object() -> None:
    plain, numbers, w = [1, {"a": "b"}], (2, 3), torch.zeros(1)
    flat, spec = trees.flatten({"plain": plain, "mixed": [w, numbers]}, trees.whole_unless(Tensor))
    assert [id(leaf) for leaf in flat] == [id(plain), id(w), id(numbers)]
    assert trees.unflatten(flat, spec) == {"plain": plain, "mixed": [w, numbers]}


# Copies of modules

WAYS = ["reference", "clone", "copy", "deepcopy", "ref", "deepclone"]


class Tied(nn.Module):
    """Has a tensor at two places, buffers, and an attribute that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.settings = {"steps": [1, 2]}
        self.also = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.second(self.first(x)))
        return result


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("by", WAYS)
def test_a_copy_computes_the_same_and_is_another_module(by: str) -> None:
    model, x = Tied(), torch.randn(5, 3)
    model.eval()
    copied = module_clone(model, by=by)
    assert type(copied) is Tied
    assert not copied.training
    assert torch.equal(copied(x), model(x))
    copied.train()
    copied.settings["steps"].append(3)
    copied.first = nn.Linear(3, 3)
    copied.norm.bias = None  # type: ignore[assignment]
    assert not model.training
    assert model.settings == {"steps": [1, 2]}
    assert model.first.weight is model.second.weight
    assert model.norm.bias is not None


@pytest.mark.parametrize("by", WAYS)
def test_what_is_at_two_places_stays_one(by: str) -> None:
    copied = module_clone(Tied(), by=by)
    assert copied.first.weight is copied.second.weight is copied.also[0]


@pytest.mark.parametrize("by", ["clone", "copy"])
def test_clones_are_tensors_in_the_graph(by: str) -> None:
    model = nn.Linear(2, 2)
    copied = module_clone(model, by=by)
    for parameter in copied.parameters():
        assert type(parameter) is Tensor
        assert type(parameter.grad_fn).__name__ == "CloneBackward0"
    again = module_clone(copied, by=by)
    (again(torch.ones(2)) * 3).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 2), 3.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("by", ["deepcopy", "deepclone"])
def test_deep_copies_are_new_leaves(by: str) -> None:
    model = Tied()
    model.first.bias.requires_grad_(False)
    copied = module_clone(model, by=by)
    for name, parameter in model.named_parameters():
        own: Any = dict(copied.named_parameters())[name]
        assert type(own) is nn.Parameter
        assert own.requires_grad == parameter.requires_grad
        assert own.data_ptr() != parameter.data_ptr()
    copied(torch.randn(5, 3)).sum().backward()
    assert model.first.weight.grad is None
    assert model.norm.num_batches_tracked == 0


@pytest.mark.parametrize("by", WAYS)
def test_detached_buffers_are_the_copys_own(by: str) -> None:
    model = Tied()
    copied = module_clone(model, by=by, detach_buffers=True)
    copied(torch.randn(5, 3))
    assert model.norm.num_batches_tracked == 0
    assert torch.equal(model.norm.running_mean, torch.zeros(3))  # type: ignore[arg-type]
    assert (copied.first.weight is model.first.weight) == (by in ("reference", "ref"))


def test_what_cannot_work() -> None:
    with pytest.raises(ConfigurationError, match="by is 'value'; it must be 'reference'"):
        module_clone(nn.Linear(1, 1), by="value")
    with pytest.raises(ArgumentTypeError, match="target is a str without tensors"):
        module_clone("model")
