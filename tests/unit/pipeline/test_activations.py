"""The frozen front alone: what is kept, what is run, and that results are those without it."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweft.errors import ConfigurationError
from torchweft.pipeline import activations
from torchweft.pipeline.activations import NOWHERE, ActivationStore, FrontMaker, FrozenFront


class Split(nn.Module):
    """Returns a tuple of a dict, as layers of a transformer may."""

    def forward(self, inputs: Tensor) -> Any:
        return {"hidden": inputs[:, :2]}, inputs[:, 2:]


class Join(nn.Module):
    def forward(self, parts: Any) -> Tensor:
        named, rest = parts
        return torch.cat([named["hidden"], rest], 1)


def front(n_frozen: int, *layers: nn.Module) -> FrozenFront:
    torch.manual_seed(0)
    made = layers or (nn.Linear(4, 4), Split(), Join(), nn.Dropout(0.5), nn.Linear(4, 3))
    named = OrderedDict((str(number), layer) for number, layer in enumerate(made))
    return FrontMaker(named, n_frozen, True, {}, 1.0)()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ActivationStore:
    """The store of this worker; there is no other, so the front asks nobody."""
    made = ActivationStore(None)
    monkeypatch.setattr(FrozenFront, "_own_store", lambda self: made)
    monkeypatch.setattr(
        FrozenFront, "_found", lambda self, store, samples, homes: store.get(samples, 0)
    )
    return made


@pytest.mark.parametrize("n_frozen", [1, 2, 3, 4])
def test_results_are_those_without_a_store(n_frozen: int, store: ActivationStore) -> None:
    stages = front(n_frozen)
    rows = torch.randn(10, 4)
    order = random.Random(0)
    for _ in range(5):
        chosen = torch.tensor(order.choices(range(10), k=6))  # Some of them twice.
        nowhere = torch.full((6,), NOWHERE)
        torch.manual_seed(7)
        found = stages(rows[chosen], chosen, nowhere)
        torch.manual_seed(7)
        assert torch.allclose(found, stages(rows[chosen], torch.full((6,), -1), nowhere))
    assert store.n_layers_run <= 10 * n_frozen
    assert store.usage() == (store.n_bytes, store.n_layers_run)
    assert not any(each.requires_grad for each in stages[0].parameters())
    assert stages[4].weight.requires_grad


def test_more_frozen_layers_go_on_from_what_is_kept(store: ActivationStore) -> None:
    rows, chosen = torch.randn(6, 4), torch.arange(6)
    nowhere = torch.full((6,), NOWHERE)
    expected = front(4).eval()(rows, torch.full((6,), -1), nowhere)
    front(1)(rows, chosen, nowhere)
    assert store.n_layers_run == 6
    assert torch.allclose(front(4)(torch.zeros(6, 4), chosen, nowhere), expected)
    assert store.n_layers_run == 6 * 4
    front(4)(torch.zeros(6, 4), chosen, nowhere)
    assert store.n_layers_run == 6 * 4


def test_shallow_results_are_given_away_and_deep_ones_are_kept() -> None:
    store = ActivationStore(None)
    for depth, samples in ((1, [0, 1]), (3, [2])):
        leaves = [torch.full((len(samples), 4), float(depth))]
        store.put(activations.Kept(depth, samples, 0, leaves))
    assert store.n_bytes == 3 * 16
    found = store.get([0, 2, 9], 3)
    assert sorted((kept.depth, kept.samples) for kept in found) == [(1, [0]), (3, [2])]
    assert store.n_bytes == 2 * 16
    assert [kept.samples for kept in store.get([0, 1, 2], 1)] == [[1], [2]]


def test_what_has_no_room_is_not_kept() -> None:
    store = ActivationStore(40)
    store.put(activations.Kept(1, [0, 1, 2], 0, [torch.zeros(3, 4)]))
    assert store.n_bytes == 32
    store.put(activations.Kept(2, [1], 0, [torch.ones(1, 6)]))  # In place of the old result.
    assert (store.n_bytes, [kept.samples for kept in store.get([0, 1, 2], 0)]) == (40, [[0], [1]])


def test_results_that_have_no_row_for_each_sample(store: ActivationStore) -> None:
    stages = front(1, nn.Flatten(0), nn.Identity())
    with pytest.raises(ConfigurationError, match=r"first 1 layers return float32\[24\] for 6"):
        stages(torch.randn(6, 4), torch.arange(6), torch.full((6,), NOWHERE))
    assert store.n_bytes == 0


def test_frozen_layers_stay_in_evaluation_mode() -> None:
    stages = front(4)
    assert [layer.training for layer in stages] == [False] * 4 + [True]
    stages.train()
    assert [layer.training for layer in stages] == [False] * 4 + [True]
    stages.eval()
    assert not any(layer.training for layer in stages)
