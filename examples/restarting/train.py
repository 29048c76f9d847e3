"""Training that survives the death of any of its workers, any number of times.

    torchweft run -n 3 --restarts 10 examples/restarting/train.py SNAPSHOTS

Kill any worker during the run (``kill -9``; each worker prints its process id). The launcher
restarts the group, and the loop continues from the last snapshot. The printed losses equal those
of an undisturbed run, digit for digit.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor, nn

import torchweft as weft
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer

STEPS = 2000
EVERY = 50


class Layer(nn.Module):
    """A layer with dropout, so its output also depends on its worker's random numbers."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width_in, width_out)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.dropout(self.linear(inputs)))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


def make_state() -> dict[str, object]:
    """Returns the state of the training before the first step."""
    torch.manual_seed(0)
    for rank in (1, 2):
        weft.rpc_sync(rank, torch.manual_seed, args=(rank,))
    model = [RemoteModule("rank:1", Layer, (8, 64)), RemoteModule("rank:2", Layer, (64, 1))]
    parameters = [parameter for layer in model for parameter in layer.remote_parameters()]
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=0.001)
    return {"model": model, "optimizer": optimizer, "losses": []}


def train(snapshots: str) -> None:
    state = make_state()
    (first, second), optimizer, losses = state["model"], state["optimizer"], state["losses"]
    steps = weft.checkpoint.resumable(STEPS, snapshots, state, every=EVERY, in_background=True)
    print(f"life {os.environ.get('WEFT_RESTART_COUNT', 0)} begins with step {steps.first_step}")
    for step in steps:
        inputs = torch.randn(32, 8)
        targets = inputs.sum(dim=1, keepdim=True).sin()
        with weft.autograd.context() as context_id:
            loss = second.then(loss_of, targets)(first(inputs))
            weft.autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
        if (step + 1) % EVERY == 0:
            print(f"step {step + 1}: loss {sum(losses[-EVERY:]) / EVERY!r}")


def main() -> None:
    weft.init_rpc()
    print(f"process {os.getpid()}")
    if weft.get_worker_info().id == 0:
        train(sys.argv[1])
    weft.shutdown()


if __name__ == "__main__":
    main()
