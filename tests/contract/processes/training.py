"""A training step that uses all that Weft offers, which restricted workers have to allow."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import torchweft.autograd
from tests.contract.processes import attacks
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer, clip_grad_norm_

ROWS = torch.tensor([0, 1, 1])
TARGET = torch.ones(3, 2)


def train_locally(steps: int) -> list[float]:
    torch.manual_seed(3)
    model = attacks.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = attacks.loss_of(model(ROWS), TARGET)
        loss.backward()
        nn.utils.clip_grad_norm_([*model.layer.parameters()], 1e6)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_remotely(worker: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Trains a model on another worker; returns its losses and its final state."""
    torch.manual_seed(3)
    state = attacks.Model().state_dict()
    model = RemoteModule(worker, attacks.Model)
    model.load_state_dict(state)
    parameters = model.remote_parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    losses = []
    for step in range(steps):
        with torchweft.autograd.context() as context_id:
            if step % 2:
                loss = model.then(attacks.loss_of, TARGET)(ROWS)
            else:
                loss = attacks.loss_of(model(ROWS), TARGET)
            torchweft.autograd.backward(context_id, [loss])
            clip_grad_norm_(context_id, parameters[1:], 1e6)
            optimizer.step(context_id)
        losses.append(loss.item())
    optimizer.load_state_dict(optimizer.state_dict())
    return losses, model.state_dict()
