from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from torchweft.checkpoint.kinds import VALUE, take
from torchweft.checkpoint.plan import leaves
from torchweft.errors import ArgumentTypeError, ConfigurationError


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
    state = {"history": {"losses": [1.0], "more": {}}, "empty": [], "mixed": [1, torch.ones(1)]}
    assert [leaf.path for leaf in leaves(state)] == ["history", "empty", "mixed/0", "mixed/1"]


def test_a_dict_of_a_subclass_is_one_entry_and_stays_what_it_is() -> None:
    state: dict[str, Any] = {"counts": defaultdict(list), "mixed": defaultdict(list)}
    counts = state["counts"]
    counts["losses"].append(1.0)
    state["mixed"]["best"] = torch.ones(1)
    entry, within = leaves(state)
    assert (entry.path, within.path) == ("counts", "mixed/best")
    saved = take("counts", VALUE, entry.value)
    assert (type(saved), saved) == (dict, {"losses": [1.0]})
    counts.clear()
    leaves(state)[0].put(saved)
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
        ({"a": {"": torch.ones(1)}}, ConfigurationError, "has the key '' in 'a'; a key must not"),
    ],
    ids=["list", "number", "slash", "empty"],
)
def test_keys_that_name_nothing_are_refused(
    state: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        leaves(state)
