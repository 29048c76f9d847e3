"""A model in layers, each on any worker, and the same model in one process."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

import torchweft
from tests.gpu.device import DEVICE
from torchweft import rpc

WIDTHS = (48, 64, 32, 8)
ROWS = 96

_lock = threading.Lock()
_layers: dict[int, nn.Module] = {}
_spare: list[Tensor] = []


def make_layer(place: int) -> nn.Module:
    """Returns a layer with the same random parameters in each process, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(place)
        return nn.Sequential(nn.Linear(WIDTHS[place], WIDTHS[place + 1]), nn.Tanh())


def inputs(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTHS[0], generator=generator)


def layer_here(place: int) -> nn.Module:
    """Returns this worker's layer for a place, on the device; makes it at first."""
    with _lock:
        if place not in _layers:
            _layers[place] = make_layer(place).to(DEVICE)
        return _layers[place]


def forget() -> None:
    _layers.clear()
    _spare.clear()


def forward(value: Tensor, place: int, rest: tuple[str, ...] = ()) -> Tensor:
    """Runs a layer here, and the following ones at other workers; each calls the next."""
    hidden: Tensor = layer_here(place)(value)
    if not rest:
        return hidden
    return rpc.rpc_sync(rest[0], forward, (hidden, place + 1, rest[1:]))


def two_of(value: Tensor, place: int) -> dict[str, Tensor]:
    """Returns two results of which callers may use one."""
    hidden = layer_here(place)(value)
    return {"used": hidden * 2, "unused": hidden.exp()}


def gradients_here(context_id: int, place: int) -> list[Tensor]:
    found = torchweft.autograd.get_gradients(context_id)
    return [found[parameter] for parameter in layer_here(place).parameters()]


def grads_here(place: int) -> list[Tensor | None]:
    return [parameter.grad for parameter in layer_here(place).parameters()]


def devices_here(place: int) -> set[str]:
    """Returns the devices of the parameters, and of their gradients."""
    parameters = list(layer_here(place).parameters())
    found = [*parameters, *[each.grad for each in parameters if each.grad is not None]]
    return {str(tensor.device) for tensor in found}


def parameters_of(module: rpc.RRef[nn.Module]) -> list[Tensor]:
    return [parameter.detach() for parameter in module.local_value().parameters()]


class WholeModel(nn.Module):
    """All layers in this process."""

    def __init__(self, device: torch.device = DEVICE) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            make_layer(place).to(device) for place in range(len(WIDTHS) - 1)
        )

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
        return value

    def gradients(self, loss: Tensor, place: int, **options: Any) -> list[Tensor]:
        parameters = list(self.layers[place].parameters())
        return list(torch.autograd.grad(loss, parameters, retain_graph=True, **options))
