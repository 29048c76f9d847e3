"""Tests a worker's part of a snapshot, without other workers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.optim.references import reference
from torchweft.checkpoint import parts
from torchweft.checkpoint.parts import Owned, parameter_names
from torchweft.engine.threads.device_streams import new_guard
from torchweft.optim.local import GroupPart, LocalOptimizer

LOCK = new_guard()


@pytest.fixture(autouse=True)
def lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "step_lock", lambda: LOCK)


def optimizer_of(module: nn.Module, first: int) -> LocalOptimizer:
    parameters = list(module.parameters())
    numbers = list(range(first, first + len(parameters)))
    held = [reference(0, n, p) for n, p in zip(numbers, parameters, strict=True)]
    part = GroupPart(2, {}, numbers, held)
    return LocalOptimizer(lambda groups: torch.optim.Adam(groups, lr=0.5), [part], LOCK)


def step(optimizer: LocalOptimizer, module: nn.Module) -> None:
    optimizer.step({parameter: torch.ones_like(parameter) for parameter in module.parameters()}, {})


def test_a_part_has_everything_under_its_name_and_goes_back_under_other_numbers() -> None:
    module = nn.Linear(2, 1)
    optimizer = optimizer_of(module, 4)
    step(optimizer, module)
    taken = parts.take(Owned({"m": module}, {"n": 3}, {"o": optimizer}), with_random=True)
    assert taken.kinds == {"m": "module", "n": "value"}
    assert taken.described == {"o": {4: ("m:weight", (1, 2)), 5: ("m:bias", (1,))}}
    assert taken.options["o"][2]["lr"] == 0.5
    drawn = random.random()
    saved = taken.content["optimizers"]["o"]["state"]
    assert saved.keys() == {"m:weight", "m:bias"}

    other = nn.Linear(2, 1)
    another = optimizer_of(other, 0)
    content: dict[str, Any] = {
        "items": {"m": taken.content["items"]["m"]},
        "optimizers": {"o": {0: saved["m:weight"], 1: saved["m:bias"]}},
        "random": taken.content["random"],
    }
    parts.put(Owned({"m": other}, {}, {"o": another}), content, taken.options, strict=True)
    assert random.random() == drawn
    for each in (module, other):
        step(optimizer if each is module else another, each)
    assert all(map(torch.equal, module.parameters(), other.parameters()))


def test_what_is_taken_does_not_change_any_more() -> None:
    module = nn.Linear(2, 1)
    optimizer = optimizer_of(module, 0)
    step(optimizer, module)
    content = parts.take(Owned({"m": module}, {}, {"o": optimizer}), with_random=False).content
    weight = content["items"]["m"]["state"]["state"]["weight"].clone()
    average = content["optimizers"]["o"]["state"]["m:weight"]["exp_avg"].clone()
    step(optimizer, module)
    assert torch.equal(content["items"]["m"]["state"]["state"]["weight"], weight)
    assert torch.equal(content["optimizers"]["o"]["state"]["m:weight"]["exp_avg"], average)
    assert content["random"] is None


class Locked(nn.Module):
    """Notes whether the optimizers' lock is held while its state is taken."""

    is_locked = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.is_locked = LOCK.lock.locked()
        return super().state_dict(*args, **kwargs)


class Asking:
    """Takes the optimizers' lock to return its state, as a distributed optimizer does."""

    def state_dict(self) -> dict[str, Any]:
        with LOCK.lock:
            return {"random": random.random()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("never called")


def test_modules_are_taken_between_steps_and_objects_may_wait_for_one() -> None:
    module = Locked()
    drawn_before = random.getstate()
    content = parts.take(Owned({"m": module, "a": Asking()}, {}, {}), with_random=True).content
    assert module.is_locked
    # The object draws its random number before the generators' state is taken.
    assert content["random"]["python"] == random.getstate() != drawn_before


class Holder:
    """An object with named parameters that is not a module."""

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
