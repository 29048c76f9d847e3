"""Tests a worker's part of a snapshot, without other workers."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchweft.checkpoint import parts
from torchweft.checkpoint.parts import OwnedState, leaves, parameter_names
from torchweft.engine.threads.device_streams import new_guard
from torchweft.errors import ArgumentTypeError, ConfigurationError

LOCK = new_guard()


@pytest.fixture(autouse=True)
def lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "step_lock", lambda: LOCK)
    monkeypatch.setattr(parts, "this_worker", lambda: SimpleNamespace(name="ps"))


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


# The entries of a state


def test_what_is_plain_throughout_is_one_entry() -> None:
    mixed = [1, {"w": torch.ones(1)}]
    state: dict[str, Any] = {"history": {"losses": [1.0], "more": {}}, "empty": [], "mixed": mixed}
    assert [leaf.path for leaf in leaves(state)] == ["history", "empty", "mixed"]
    state["mixed"] = [*mixed, nn.Linear(1, 1)]
    assert [leaf.path for leaf in leaves(state)][2:] == ["mixed/0", "mixed/1", "mixed/2"]


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
