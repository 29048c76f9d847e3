"""Snapshots of modules and optimizers that live on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import models
from tests.gpu.device import DEVICE
from tests.gpu.models import inputs, make_layer
from torchweft import autograd, checkpoint, rpc
from torchweft.launch import Cluster
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer

WORKERS = ("worker0", "worker1")


class Training:
    """Two layers on the device of two workers, their optimizer, and a tensor on the device here."""

    def __init__(self) -> None:
        self.layers = [
            RemoteModule(f"{worker}/{DEVICE}", make_layer, args=(place,))
            for place, worker in enumerate(WORKERS)
        ]
        references = [each for layer in self.layers for each in layer.remote_parameters()]
        self.optimizer = DistributedOptimizer(torch.optim.Adam, references, lr=0.01)
        self.scale = torch.ones(4, device=DEVICE)
        self.state: dict[str, Any] = {
            "layers": list(self.layers),
            "optimizer": self.optimizer,
            "scale": self.scale,
            "done": 0,
        }

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.state["done"] += 1
            self.scale.mul_(1.5)
            with autograd.context() as context_id:
                value = inputs(self.state["done"]).to(DEVICE) * self.scale[0]
                for layer in self.layers:
                    value = layer(value)
                autograd.backward(context_id, [value.square().mean()])
                self.optimizer.step(context_id)

    def parameters(self) -> list[Tensor]:
        modules = [layer.get_module_rref() for layer in self.layers]
        return [
            parameter
            for module in modules
            for parameter in rpc.rpc_sync(module.owner(), models.parameters_of, (module,))
        ]

    def moments(self) -> list[Tensor]:
        """Returns the state that the optimizer has for each parameter."""
        states = self.optimizer.state_dict()["state"].values()
        return [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("in_background", [False, True])
def test_training_goes_on_as_if_nothing_had_happened(
    group: Cluster, tmp_path: Path, in_background: bool
) -> None:
    training = Training()
    training.train(3)
    if in_background:
        pending = checkpoint.save_async(tmp_path, training.state, step=3)
        training.train(3)  # while the files are written
        pending.wait()
    else:
        checkpoint.save(tmp_path, training.state, step=3)
        training.train(3)
    wanted = [training.parameters(), training.moments(), training.scale.clone()]
    training.train(2)
    checkpoint.restore(tmp_path, training.state)
    assert training.state["done"] == 3
    training.train(3)
    found = [training.parameters(), training.moments(), training.scale]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert {each.device for each in training.parameters()} == {DEVICE}
    assert training.scale.device == DEVICE


def test_another_group_of_modules_takes_a_snapshot_over(group: Cluster, tmp_path: Path) -> None:
    training = Training()
    training.train(2)
    checkpoint.save(tmp_path, training.state, step=2)
    other = Training()
    checkpoint.restore(tmp_path, other.state)
    training.train(2)
    other.train(2)
    torch.testing.assert_close(other.parameters(), training.parameters(), rtol=0, atol=0)
    assert torch.equal(other.scale, training.scale)
