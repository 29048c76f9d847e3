from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from tests.tables import cases
from torchweft.checkpoint import files, kinds
from torchweft.checkpoint.kinds import DATA, GENERATOR, MODULE, OBJECT, TENSOR, VALUE
from torchweft.errors import ArgumentTypeError


def scheduler() -> Any:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (nn.Linear(1, 1), MODULE),
        (torch.ones(1), TENSOR),
        (torch.Generator(), GENERATOR),
        (scheduler(), OBJECT),
    ],
    ids=["module", "tensor", "generator", "object"],
)
def test_what_can_be_changed_in_place_is_of_one_kind_wherever_it_is(value: Any, kind: str) -> None:
    assert kinds.kind_of("x", value, is_remote=True) == kind
    assert kinds.kind_of("x", value, is_remote=False) == kind


def test_plain_values_are_replaced_here_and_filled_behind_references() -> None:
    assert kinds.kind_of("x", 3, is_remote=False) == VALUE
    assert kinds.kind_of("x", [3], is_remote=True) == DATA
    for value in (3, "text", (1, 2), threading.Lock()):
        with pytest.raises(ArgumentTypeError, match="a/b is a reference to a"):
            kinds.kind_of("a/b", value, is_remote=True)


class Versioned(nn.Module):
    """A module of version 2 that notes the version in the state it loads."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.tensor(3))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.loaded = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_a_module_comes_back_with_buffers_and_versions() -> None:
    module = Versioned()
    state = kinds.take("x", MODULE, module)
    with torch.no_grad():
        module.weight.zero_()
        module.count += 1  # type: ignore[operator]
    parameter = module.weight
    kinds.put(MODULE, module, state, strict=True)
    assert module.weight is parameter
    assert parameter.tolist() == [1.0, 1.0]
    assert module.count == 3
    assert module.loaded == 2


def test_others_come_back_as_the_same_objects() -> None:
    steps, tensor, generator = scheduler(), torch.ones(2, requires_grad=True), torch.Generator()
    numbers, words = [1, 2], {"a": 1}
    values = [
        (OBJECT, steps),
        (TENSOR, tensor),
        (GENERATOR, generator),
        (DATA, numbers),
        (DATA, words),
    ]
    states = [kinds.take("x", kind, value) for kind, value in values]
    drawn = torch.rand((), generator=generator)
    steps.milestones.clear()
    with torch.no_grad():
        tensor.zero_()
    numbers.append(3)
    words["b"] = 2
    for (kind, value), state in zip(values, states, strict=True):
        assert kinds.differences("x", kind, value, state) == ([], [], [])
        kinds.put(kind, value, state, strict=True)
    assert sorted(steps.milestones) == [2, 3]
    assert tensor.tolist() == [1.0, 1.0]
    assert torch.rand((), generator=generator) == drawn
    assert (numbers, words) == ([1, 2], {"a": 1})


class Tagged(torch.Tensor):
    """A subclass with an attribute."""


def test_a_tensor_of_a_subclass_is_saved_without_the_class(tmp_path: Path) -> None:
    tensor: Any = torch.ones(3).as_subclass(Tagged)
    tensor.tag = "kept"
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2).as_subclass(Tagged))
    values = [(TENSOR, tensor), (MODULE, module), (DATA, [tensor])]
    states = [kinds.take("x", kind, value) for kind, value in values]
    files.write_part(str(tmp_path / "part"), {"states": states})
    read = torch.load(tmp_path / "part", weights_only=True)["states"]
    with torch.no_grad():
        tensor.zero_()
        module.weight.zero_()
    for (kind, value), state in zip(values, read, strict=True):
        kinds.put(kind, value, state, strict=True)
    assert (type(tensor), tensor.tag, tensor.tolist()) == (Tagged, "kept", [1, 1, 1])
    assert module.weight.tolist() == [1, 1]


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2)


@cases(
    ("make", "text"),
    [
        (lambda: torch.empty(2, device="meta"), "a tensor on the device 'meta'"),
        (lambda: nn.LazyLinear(2).weight, "a parameter of a lazy module.* call the module once"),
        (lambda: nested(torch.jagged), "a nested tensor.* save its parts"),
        (lambda: nested(torch.strided), "a nested tensor.* save its parts"),
        (lambda: TwoTensor(torch.ones(2), torch.ones(2)), "a TwoTensor, which has no memory"),
        (fake, "a FakeTensor, which has no memory"),
    ],
)
def test_a_tensor_that_could_not_be_read_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"^x\[0\] is {text}"):
        kinds.take("x", DATA, [make()])


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def test_differences_are_named() -> None:
    state = kinds.take("a", MODULE, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)))
    other = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 4), nn.Linear(1, 1))
    found = kinds.differences("a", MODULE, other, state)
    assert found.missing == ["a:2.weight", "a:2.bias"]
    assert found.unexpected == ["a:0.bias"]
    assert found.differing == [
        "a:1.weight has shape (3, 2) in the snapshot and (4, 2) here",
        "a:1.bias has shape (3,) in the snapshot and (4,) here",
    ]
    shapes = kinds.differences("t", TENSOR, torch.ones(2), torch.ones(3))
    assert shapes.differing == ["t has shape (3,) in the snapshot and (2,) here"]


def test_an_optimizer_of_other_groups_is_refused_unless_it_loads_states_by_itself() -> None:
    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            pass

    two, one = [torch.ones(1), torch.ones(1)], [torch.ones(1)]
    state = kinds.take("o", OBJECT, torch.optim.SGD([{"params": two}, {"params": one}], lr=1.0))
    found = kinds.differences("o", OBJECT, torch.optim.SGD(two, lr=1.0), state)
    assert found.differing == ["o: groups of 2, 1 parameters there and of 2 here"]
    groups = [{"params": two}, {"params": one}]
    assert not any(kinds.differences("o", OBJECT, torch.optim.SGD(groups, lr=1.0), state))
    assert not any(kinds.differences("o", OBJECT, Own(two, lr=1.0), state))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_takes_its_shapes_from_the_snapshot() -> None:
    state = kinds.take("a", MODULE, nn.Linear(2, 3))
    lazy = nn.LazyLinear(3)
    assert kinds.differences("a", MODULE, lazy, state) == ([], [], [])
    kinds.put(MODULE, lazy, state, strict=True)
    assert lazy.weight.shape == (3, 2)
