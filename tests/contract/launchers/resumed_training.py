"""Trains a layer of another worker, and saves each second step; the result shows every bit."""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from torchweft import autograd, checkpoint, rpc
from torchweft.nn import RemoteModule

STEPS = 60
LIFE = os.environ["WEFT_RESTART_COUNT"]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dropout(self.linear(inputs)))


def descend(module: torch.nn.Module, context_id: int) -> None:
    gradients = autograd.get_gradients(context_id)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.1 * gradients[parameter]


def descend_there(module: rpc.RRef, context_id: int) -> None:
    descend(module.local_value(), context_id)


def train(snapshots: str, result: str, pause_s: float) -> None:
    owner = f"worker{int(os.environ['WORLD_SIZE']) - 1}"
    torch.manual_seed(1)
    rpc.rpc_sync(owner, torch.manual_seed, args=(2,))
    layer, head = RemoteModule(owner, Layer), torch.nn.Linear(4, 1)
    state = {"layer": layer, "head": head, "losses": []}
    steps = checkpoint.resumable(STEPS, snapshots, state, every=2, timeout=60)
    print("life", LIFE, "begins with step", steps.first_step, flush=True)
    for step in steps:
        if LIFE == "0":
            time.sleep(pause_s)  # A step takes time, so that the training can be interrupted.
        with autograd.context() as context_id:
            loss = head(layer(torch.randn(6, 4))).square().mean()
            autograd.backward(context_id, [loss])
            rpc.rpc_sync(owner, descend_there, args=(layer.get_module_rref(), context_id))
            descend(head, context_id)
        state["losses"].append(loss.item())
        print("step", step, flush=True)
    weights = [
        tensor.tolist() for module in (layer, head) for tensor in module.state_dict().values()
    ]
    with open(result, "w") as file:
        json.dump({"losses": state["losses"], "weights": weights}, file)


rpc.init_rpc(rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=30))
if os.environ["RANK"] == "0":
    train(sys.argv[1], sys.argv[2], float(sys.argv[3]))
rpc.shutdown(timeout=30)
