"""A program as users write them: it forks its workers and defines its functions itself.

The framework starts it once for each side, as a script, so that its functions are part of the main
program. Rank 0 makes the calls.
"""

from __future__ import annotations

import dataclasses
import enum
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.frame.api import Api
from benchmarks.frame.place import Place
from benchmarks.frame.runners import follow_orders, joined_group
from benchmarks.frame.work import Work
from benchmarks.frame.worker import end_with_parent

IN_FLIGHT = 2000


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Transition(NamedTuple):
    state: Tensor
    action: Tensor
    reward: float


@dataclasses.dataclass
class Sample:
    image: Tensor
    label: int
    weight: float


class Settings:
    """An object without methods for pickle."""

    def __init__(self) -> None:
        self.name = "settings"
        self.rates = [0.1, 0.2]


class Counter:
    """The object behind a remote reference."""

    def add(self, value: Tensor) -> Tensor:
        return value


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.layers(value)
        return result


def nothing() -> None:
    """Does nothing."""


def echo(value: object) -> object:
    return value


def echo_two(first: object, second: object) -> object:
    return first, second


def fail(value: object) -> object:
    raise ValueError("this value is wrong")


def use(reference: Any) -> int:
    """Returns a number; takes a reference without using its value."""
    return 1


def double(value: Tensor) -> Tensor:
    return value * 2


def values() -> dict[str, object]:
    """Returns the shapes that one call carries there and back, by name."""
    tensor = torch.arange(16.0)
    model = Model()
    return {
        "number": 7,
        "text": "a short text",
        "text 10k": "0123456789" * 1000,
        "bytes": bytes(1024),
        "tensor": torch.ones(2),
        "integers": torch.arange(64),
        "leaf": torch.ones(16, requires_grad=True),
        "parameter": nn.Parameter(torch.ones(16)),
        "same twice": [tensor, tensor],
        "two views": [tensor[:8], tensor[4:]],
        "transposed": torch.arange(64.0).view(8, 8).t(),
        "strided": torch.arange(64.0).view(8, 8)[:, ::2],
        "numbers": [index * 0.5 for index in range(50)],
        "settings": {"lr": 0.1, "betas": [0.9, 0.99], "model": {"width": 64, "name": "mlp"}},
        "sixteen": [torch.ones(2) for _ in range(16)],
        "hundred": [torch.ones(16) for _ in range(100)],
        "dict": {f"key{index}": torch.ones(8) for index in range(8)},
        "batch": (torch.ones(8, 16), torch.arange(8), [f"name{index}" for index in range(8)]),
        "samples": [{"x": torch.ones(4), "y": index} for index in range(8)],
        "observation": (torch.ones(4), 1.0, False, {"lives": 3, "time": 0.5}),
        "namedtuple": Transition(torch.ones(4), torch.ones(1), 1.0),
        "dataclass": Sample(torch.ones(16), 3, 0.5),
        "object": Settings(),
        "enum": Color.GREEN,
        "set": {f"name{index}" for index in range(10)},
        "path": pathlib.PurePosixPath("/data/model.pt"),
        "torch values": (torch.float32, torch.device("cpu"), torch.Size([2, 3])),
        "array": np.arange(64.0),
        "scalar": np.float32(0.5),
        "state_dict": model.state_dict(),
        "module": model,
        "sparse": torch.eye(8).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(16), 0.1, 0, torch.quint8),
        **{
            f"{size_bytes >> 10} KiB" if size_bytes < 1 << 20 else "1 MiB": torch.ones(
                size_bytes // 4
            )
            for size_bytes in (4096, 20480, 65536, 262144, 1 << 20)
        },
    }


def works(api: Api) -> dict[str, Work]:
    """Returns the work of each shape."""
    rpc, callee = api.rpc, api.peers[0]
    found = {name: Work(_echoed(rpc, callee, value)) for name, value in values().items()}
    tensor = torch.ones(16)
    pair = (torch.ones(16), torch.ones(16))
    own = rpc.RRef(Counter())
    counter = rpc.remote(callee, Counter)
    counter.confirmed_by_owner()
    module = api.nn.RemoteModule(callee, Model)
    found |= {
        "nothing": Work(lambda: rpc.rpc_sync(callee, nothing)),
        "two tensors": Work(lambda: rpc.rpc_sync(callee, echo_two, args=pair)),
        "keywords": Work(
            lambda: rpc.rpc_sync(callee, echo_two, kwargs={"first": tensor, "second": tensor + 1})
        ),
        "error": Work(lambda: _failing(rpc, callee)),
        "operator": Work(lambda: rpc.rpc_sync(callee, torch.add, args=(tensor, 1))),
        "async": Work(lambda: rpc.rpc_async(callee, echo, args=(tensor,)).wait()),
        "remote": Work(lambda: rpc.remote(callee, echo, args=(tensor,)).to_here()),
        "reference": Work(lambda: rpc.rpc_sync(callee, use, args=(counter,))),
        "own reference": Work(lambda: rpc.rpc_sync(callee, use, args=(own,))),
        "proxy": Work(lambda: counter.rpc_sync().add(tensor)),
        "remote module": Work(lambda: module(tensor)),
        "forward": _in_context(api, lambda leaf, _: rpc.rpc_sync(callee, double, args=(leaf,))),
        "backward": _backward(api),
        "training step": _training(api),
        "flight": Work(_in_flight(rpc, callee, tensor), IN_FLIGHT),
    }
    return found


def _echoed(rpc: Any, callee: str, value: object) -> Callable[[], object]:
    return lambda: rpc.rpc_sync(callee, echo, args=(value,))


def _failing(rpc: Any, callee: str) -> None:
    try:
        rpc.rpc_sync(callee, fail, args=(1,))
    except ValueError:
        return
    raise AssertionError("the error did not arrive")


def _in_context(api: Api, call: Callable[[Tensor, int], object]) -> Work:
    leaf = torch.ones(16, requires_grad=True)

    def run() -> None:
        with api.autograd.context() as context_id:
            call(leaf, context_id)

    return Work(run)


def _backward(api: Api) -> Work:
    """Returns a work that times the pass alone."""
    rpc, callee = api.rpc, api.peers[0]
    leaf = torch.ones(16, requires_grad=True)
    state: dict[str, Any] = {}

    def prepare() -> None:
        state["context"] = api.autograd.context()
        state["id"] = state["context"].__enter__()
        state["loss"] = rpc.rpc_sync(callee, double, args=(leaf,)).sum()

    def finish() -> None:
        state["context"].__exit__(None, None, None)

    return Work(lambda: api.autograd.backward(state["id"], [state["loss"]]), 1, prepare, finish)


def _training(api: Api) -> Work:
    callee = api.peers[0]
    module = api.nn.RemoteModule(callee, Model)
    optimizer = api.optim.DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.01)
    inputs, target = torch.ones(8, 16), torch.zeros(8, 4)

    def step() -> None:
        with api.autograd.context() as context_id:
            loss = nn.functional.mse_loss(module(inputs), target)
            api.autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    return Work(step)


def _in_flight(rpc: Any, callee: str, tensor: Tensor) -> Callable[[], object]:
    def batch() -> object:
        calls = [rpc.rpc_async(callee, echo, args=(tensor,)) for _ in range(IN_FLIGHT)]
        return [call.wait() for call in calls]

    return batch


def run_worker(place: Place) -> None:
    """Serves calls until the caller leaves the group."""
    end_with_parent()
    os.sched_setaffinity(0, place.cores)
    with joined_group(place):
        pass


def main() -> None:
    """Forks the other workers, and makes the calls as the framework orders them."""
    end_with_parent()
    place = Place.from_json(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    forking = multiprocessing.get_context("fork")
    others = []
    for rank, cores in enumerate(place.cores_of_others, start=1):
        other = dataclasses.replace(place, rank=rank, cores=cores)
        others.append(forking.Process(target=run_worker, args=(other,), daemon=True))
        others[-1].start()
    os.sched_setaffinity(0, place.cores)
    with joined_group(place) as api:
        pids = [process.pid for process in others if process.pid is not None]
        follow_orders(works(api), answers, pids)
    for process in others:
        process.join()


if __name__ == "__main__":
    main()
