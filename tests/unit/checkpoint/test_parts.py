"""Tests a worker's part of a snapshot, without other workers."""

from __future__ import annotations

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.checkpoint.encoded import saved
from tests.unit.optim.references import reference
from torchweft.checkpoint import parts
from torchweft.checkpoint.kinds import VALUE
from torchweft.checkpoint.parts import OwnedState, leaves, parameter_names
from torchweft.engine.threads.device_streams import new_guard
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.optim.local import GroupPart, LocalOptimizer

LOCK = new_guard()


@pytest.fixture(autouse=True)
def lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "step_lock", lambda: LOCK)
    monkeypatch.setattr(parts, "this_worker", lambda: SimpleNamespace(name="ps"))


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
    part, options = parts.take(
        OwnedState({"m": module}, {"n": 3}, {"o": optimizer}), with_random=True
    )
    content = part.content()
    assert {path: item["kind"] for path, item in content.items()} == {
        "m": "module",
        "n": "value",
        "o/state/m:weight": "parameter's state",
        "o/state/m:bias": "parameter's state",
        "/random/ps": "random state",
    }
    assert options["o"][2]["lr"] == 0.5
    saved = content["o/state/m:weight"]["state"]
    assert (saved["shape"], saved["group"], saved["state"].keys()) == (
        [1, 2],
        2,
        {"step", "exp_avg", "exp_avg_sq"},
    )
    drawn = random.random()
    other = nn.Linear(2, 1)
    another = optimizer_of(other, 0)
    parts.put(OwnedState({"m": other}, {}, {"o": another}), content, options, strict=True)
    assert random.random() == drawn
    for each in (module, other):
        step(optimizer if each is module else another, each)
    assert all(map(torch.equal, module.parameters(), other.parameters()))


def test_what_is_taken_does_not_change_any_more() -> None:
    module = nn.Linear(2, 1)
    optimizer = optimizer_of(module, 0)
    step(optimizer, module)
    part, _ = parts.take(OwnedState({"m": module}, {}, {"o": optimizer}), with_random=False)
    content = part.content()
    weight = content["m"]["state"]["state"]["weight"]
    average = content["o/state/m:weight"]["state"]["state"]["exp_avg"]
    before = weight.clone(), average.clone()
    step(optimizer, module)
    assert torch.equal(weight, before[0])
    assert torch.equal(average, before[1])
    assert "/random/ps" not in content


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
    owned = OwnedState({"m": module, "a": Asking()}, {}, {})
    part, _ = parts.take(owned, with_random=True)
    content = part.content()
    assert module.is_locked
    # The object draws its random number before the generators' state is taken.
    assert content["/random/ps"]["state"]["python"] == random.getstate() != drawn_before


class Holder:
    """An object with named parameters that is not a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def named_parameters(self) -> object:
        return self._module.named_parameters()


def test_parameters_are_called_as_in_the_state() -> None:
    first, second, alone = nn.Linear(1, 1), nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    inside = nn.Parameter(torch.ones(1))
    items = {"a/b": nn.Sequential(first), "c": Holder(second), "w": alone, "n": {"k": [2, inside]}}
    parameters = {
        4: first.bias,
        2: second.weight,
        7: alone,
        3: inside,
        1: nn.Parameter(torch.ones(1)),
    }
    assert parameter_names(items, parameters) == {
        4: "a/b:0.bias",
        2: "c:weight",
        7: "w",
        3: "n/k/1",
        1: "#1",
    }


def test_one_that_is_in_two_entries_has_the_name_in_the_first() -> None:
    layer = nn.Linear(1, 1)
    items = {"z": layer, "a": nn.Sequential(layer)}
    assert parameter_names(items, {0: layer.weight}) == {0: "z:weight"}


# The entries of a state


def test_entries_are_named_by_the_keys_that_lead_to_them() -> None:
    layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
    weights = torch.ones(1)
    state: dict[str, Any] = {"model": {"layers": layers, "w": weights}, "step": 3}
    found = {leaf.path: leaf for leaf in leaves(state)}
    assert list(found) == ["model/layers/0", "model/layers/1", "model/w", "step"]
    assert found["model/layers/1"].value is layers[1]
    assert (found["model/layers/1"].container, found["model/layers/1"].key) == (layers, 1)
    assert found["step"].container is state


def test_what_is_plain_throughout_is_one_entry() -> None:
    mixed = [1, {"w": torch.ones(1)}]
    state: dict[str, Any] = {"history": {"losses": [1.0], "more": {}}, "empty": [], "mixed": mixed}
    assert [leaf.path for leaf in leaves(state)] == ["history", "empty", "mixed"]
    state["mixed"] = [*mixed, nn.Linear(1, 1)]
    assert [leaf.path for leaf in leaves(state)][2:] == ["mixed/0", "mixed/1", "mixed/2"]


def test_a_dict_of_a_subclass_is_one_entry_and_stays_what_it_is() -> None:
    state: dict[str, Any] = {"counts": defaultdict(list), "mixed": defaultdict(list)}
    counts = state["counts"]
    counts["losses"].append(1.0)
    state["mixed"]["best"] = nn.Linear(1, 1)
    entry, within = leaves(state)
    assert (entry.path, within.path) == ("counts", "mixed/best")
    found = saved(VALUE, entry.value)
    assert (type(found), found) == (dict, {"losses": [1.0]})
    counts.clear()
    leaves(state)[0].put(found)
    assert state["counts"] is counts
    assert counts == {"losses": [1.0]}
    assert counts["more"] == []


def test_the_state_itself_is_no_entry() -> None:
    assert [leaf.path for leaf in leaves({"a": 1, "b": {"c": 2}})] == ["a", "b"]


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ([nn.Linear(1, 1)], ArgumentTypeError, "the state is a list"),
        ({1: nn.Linear(1, 1)}, ArgumentTypeError, "has the key 1, an int; name"),
        ({"a/b": 1}, ConfigurationError, "has the key 'a/b'; a key must not"),
        ({"a": {"": nn.Linear(1, 1)}}, ConfigurationError, "has the key '' in 'a'; a key must not"),
    ],
    ids=["list", "number", "slash", "empty"],
)
def test_keys_that_name_nothing_are_refused(
    state: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        leaves(state)
