"""Functions of a training over several workers, for snapshot tests."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.contract.processes.checkpoint_model import Counter
from torchweft import autograd, checkpoint, rpc
from torchweft.checkpoint import files, parts, snapshots
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer

STEPS = 8
EVERY = 2
WIDTHS = (4, 8, 3)


class Layer(nn.Module):
    """A layer whose results depend on the random numbers of its worker, and on a buffer."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width_in, width_out)
        self.norm = nn.BatchNorm1d(width_out)

    def forward(self, inputs: Tensor) -> Tensor:
        noise = random.random() + float(np.random.random())
        hidden: Tensor = nn.functional.dropout(self.norm(self.linear(inputs)), 0.3)
        return torch.tanh(hidden + noise)


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def make_state(first: str, second: str, kind: Any = torch.optim.Adam) -> dict[str, Any]:
    """Returns the state of a training whose model lives on two workers and on this worker."""
    seed(0)
    for number, worker in enumerate(dict.fromkeys([first, second]), start=1):
        rpc.rpc_sync(worker, seed, args=(number,))
    layers = [
        RemoteModule(worker, Layer, args=WIDTHS[place : place + 2])
        for place, worker in enumerate([first, second])
    ]
    head = nn.Linear(WIDTHS[2], 1)
    references = [reference for layer in layers for reference in layer.remote_parameters()]
    groups = [
        {"params": references},
        {"params": [rpc.RRef(parameter) for parameter in head.parameters()], "lr": 0.05},
    ]
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = DistributedOptimizer(kind, groups, **options)
    return {
        "model": {"layers": layers, "head": head},
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=3),
        "losses": [],
        "data": torch.Generator().manual_seed(7),
        "kept": {
            "average": rpc.remote(second, torch.zeros, args=(3,)),
            "counter": rpc.remote(first, Counter),
            "seen": rpc.remote(second, dict),
        },
    }


def run_step(state: dict[str, Any], *, die: bool = False) -> None:
    """Trains one step; with ``die``, kills this process before the optimizer's step."""
    model, kept = state["model"], state["kept"]
    batch = torch.randn(6, WIDTHS[0], generator=state["data"])
    with autograd.context() as context_id:
        hidden = batch
        for layer in model["layers"]:
            hidden = layer(hidden)
        loss = model["head"](hidden).square().mean()
        autograd.backward(context_id, [loss])
        if die:
            kill_this()
        state["optimizer"].step(context_id)
    state["scheduler"].step()
    state["losses"].append(float(loss.detach()))
    number = kept["counter"].rpc_sync().count()
    rpc.rpc_sync(kept["seen"].owner(), note, args=(kept["seen"], kept["average"], number))


def note(seen: rpc.RRef[dict[str, int]], average: rpc.RRef[Tensor], number: int) -> None:
    seen.local_value()[f"step {number}"] = number
    average.local_value().mul_(0.5).add_(torch.rand(3))


def digest_of(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a digest that is the same for trainings whose states agree to the last bit."""
    kept = state["kept"]
    return {
        "losses": list(state["losses"]),
        "layers": [_hash(layer.state_dict()) for layer in state["model"]["layers"]],
        "head": _hash(state["model"]["head"].state_dict()),
        "optimizer": _hash(state["optimizer"].state_dict()["state"]),
        "rates": [group["lr"] for group in state["optimizer"].param_groups],
        "scheduler": state["scheduler"].state_dict()["last_epoch"],
        "kept": [
            kept["average"].to_here().tolist(),
            kept["counter"].rpc_sync().state_dict(),
            kept["seen"].to_here(),
        ],
        "random": [rpc.rpc_sync(info, draw) for info in rpc.get_worker_infos()],
    }


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def _hash(value: Any) -> str:
    found = hashlib.sha256()
    _add(found, value)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        found.update(value.detach().contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            found.update(str(key).encode())
            _add(found, value[key])
    else:
        found.update(repr(value).encode())


# The driver's program


def join(name: str, rank: int, world_size: int, method: str) -> None:
    options = rpc.RpcBackendOptions(init_method=method, init_timeout=10.0, rpc_timeout=15.0)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)


def train(
    directory: str, first: str, second: str, *, in_background: bool = False, die_at: int = -1
) -> tuple[int, dict[str, Any]]:
    """Trains from the last snapshot to the end; returns the first step and the digest."""
    state = make_state(first, second)
    steps = checkpoint.resumable(
        STEPS, directory, state, every=EVERY, in_background=in_background, timeout=15.0
    )
    for step in steps:
        run_step(state, die=step == die_at)
    return steps.first_step, digest_of(state)


def train_keyworded(directory: str, first: str, second: str, how: dict[str, Any]) -> Any:
    return train(directory, first, second, **how)


# Dying at a named point


def kill_this() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str, step: int) -> None:
    """Makes this worker kill itself at a named point of a step's snapshot."""
    _POINTS[point](f"-step{step}-")


def _before(module: Any, name: str, is_it: Callable[..., bool]) -> None:
    real = getattr(module, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        if is_it(*args):
            kill_this()
        return real(*args, **kwargs)

    setattr(module, name, dying)


def _after(module: Any, name: str, is_it: Callable[..., bool]) -> None:
    real = getattr(module, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if is_it(*args):
            kill_this()
        return result

    setattr(module, name, dying)


def _is_manifest(mark: str) -> Callable[..., bool]:
    return lambda unfinished, path: mark in path and path.endswith("manifest.json")


def _is_part(mark: str) -> Callable[..., bool]:
    return lambda unfinished, path: mark in path and path.endswith(".pt")


def _while_copying(mark: str) -> None:
    calls = []

    def is_second(*args: Any) -> bool:
        calls.append(None)
        return len(calls) == 2  # the snapshot of step 4

    _after(parts, "take", is_second)


def _while_writing(mark: str) -> None:
    """Dies when some bytes of a part are written, but not all."""
    real = files.save_tensors

    def dying(tensors: Any, path: str, metadata: Any) -> None:
        real(tensors, path, metadata)
        if mark in path:
            os.truncate(path, os.path.getsize(path) // 2)
            kill_this()

    files.save_tensors = dying


_POINTS: dict[str, Callable[[str], None]] = {
    "while copying": _while_copying,
    "while writing": _while_writing,
    "before naming": lambda mark: _before(files, "rename", _is_part(mark)),
    "after naming": lambda mark: _after(files, "rename", _is_part(mark)),
    "before the manifest": lambda mark: _before(files, "rename", _is_manifest(mark)),
    "after the manifest": lambda mark: _after(files, "rename", _is_manifest(mark)),
    "while removing": lambda mark: _before(snapshots, "remove", lambda path: mark in path),
}
