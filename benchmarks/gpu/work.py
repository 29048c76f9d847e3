"""The measured programs: the same text for either library, and a copy in one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.frame.api import Api
from benchmarks.frame.work import Numbers, Work
from benchmarks.gpu.question import GPU, IN_FLIGHT, KIB, SIZES, WIDTHS

__all__ = ["copy_works", "works"]

DEVICE = torch.device(os.environ.get("BENCHMARK_DEVICE", GPU))
FEATURES, BATCH = 512, 256
CHECKED_STEPS = 5


def settle() -> None:
    """Waits for the work of the current stream."""
    if DEVICE.type == "cuda":
        torch.cuda.current_stream(DEVICE).synchronize()


def new_tensor(size_bytes: int) -> Tensor:
    """Returns a tensor whose numbers all differ."""
    tensor = torch.arange(size_bytes // 4, dtype=torch.int32, device=DEVICE)
    settle()
    return tensor


# Called remotely


def take(tensor: Tensor) -> None:
    """Takes a tensor; returns when its numbers are there."""
    settle()


def echo(tensor: Tensor) -> Tensor:
    return tensor


def total(tensor: Tensor) -> tuple[str, int]:
    """Returns where a tensor has arrived, and its sum."""
    return str(tensor.device), int(tensor.sum(dtype=torch.int64))


_linears: dict[int, nn.Linear] = {}


def apply_linear(value: Tensor) -> Tensor:
    width = value.shape[1]
    if width not in _linears:
        torch.manual_seed(width)
        _linears[width] = nn.Linear(width, width).to(DEVICE)
    result: Tensor = _linears[width](value)
    return result


def make_linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(FEATURES, FEATURES)


# Works


class Sender:
    """Makes calls with a tensor, which is kept until one of another size is sent."""

    def __init__(self, api: Api) -> None:
        self._rpc = api.rpc
        self._callee = api.peers[0]
        self._tensor = torch.empty(0)
        self._proven: set[int] = set()

    def one_way(self, size_bytes: int) -> Work:
        return Work(
            lambda: self._rpc.rpc_sync(self._callee, take, args=(self._tensor,)),
            prepare=lambda: self._load(size_bytes),
        )

    def round_trip(self, size_bytes: int) -> Work:
        return Work(self._there_and_back, prepare=lambda: self._load(size_bytes))

    def in_flight(self, size_bytes: int) -> Work:
        return Work(self._all_at_once, IN_FLIGHT, prepare=lambda: self._load(size_bytes))

    def _there_and_back(self) -> None:
        self._rpc.rpc_sync(self._callee, echo, args=(self._tensor,))
        settle()

    def _all_at_once(self) -> None:
        arguments = (self._tensor,)
        calls = [self._rpc.rpc_async(self._callee, echo, args=arguments) for _ in range(IN_FLIGHT)]
        torch.futures.wait_all(calls)
        settle()

    def _load(self, size_bytes: int) -> None:
        if self._tensor.nbytes == size_bytes:
            return
        self._tensor = torch.empty(0)
        self._tensor = new_tensor(size_bytes)
        if size_bytes not in self._proven:
            found = self._rpc.rpc_sync(self._callee, total, args=(self._tensor,))
            if tuple(found) != total(self._tensor):
                raise RuntimeError(f"{size_bytes} bytes: {total(self._tensor)} arrived as {found}")
            self._proven.add(size_bytes)


class Passes:
    """Forward and backward passes through one other worker."""

    def __init__(self, api: Api, width: int) -> None:
        self._api = api
        self._callee = api.peers[0]
        self._inputs = torch.linspace(-1, 1, width * width).reshape(width, width).to(DEVICE)
        self._inputs.requires_grad_()

    def run(self) -> Tensor:
        """Runs both passes; returns the gradient of the inputs."""
        with self._api.autograd.context() as context_id:
            result = self._api.rpc.rpc_sync(self._callee, apply_linear, args=(self._inputs * 1,))
            self._api.autograd.backward(context_id, [result.square().sum()])
            gradient: Tensor = self._api.autograd.get_gradients(context_id)[self._inputs]
            settle()
        return gradient

    def numbers(self) -> Sequence[float]:
        gradient = self.run()
        return [float(each) for each in (gradient.abs().sum(), gradient.max(), gradient[1, 1])]


class Training:
    """A layer on another worker, and its optimizer; made at the first step."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._made: tuple[Any, Any] | None = None
        self._inputs = torch.linspace(-1, 1, BATCH * FEATURES).reshape(BATCH, FEATURES).to(DEVICE)

    def make(self) -> None:
        if self._made is None:
            place = f"{self._api.peers[0]}/{DEVICE}"
            module = self._api.nn.RemoteModule(place, make_linear, args=(1,))
            optimizer = self._api.optim.DistributedOptimizer(
                torch.optim.SGD, module.remote_parameters(), lr=0.01
            )
            self._made = module, optimizer

    def step(self) -> Tensor:
        assert self._made is not None
        module, optimizer = self._made
        with self._api.autograd.context() as context_id:
            loss: Tensor = module.forward(self._inputs).square().mean()
            self._api.autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            settle()
        return loss

    def losses(self) -> Sequence[float]:
        self.make()
        return [float(self.step()) for _ in range(CHECKED_STEPS)]


def works(api: Api) -> dict[str, Work | Numbers]:
    """Returns the works of an RPC library."""
    sender, training = Sender(api), Training(api)
    found: dict[str, Work | Numbers] = {
        "round trip 8 B": sender.round_trip(8),
        "round trip 64 KiB": sender.round_trip(64 * KIB),
        "in flight": sender.in_flight(8),
        "step": Work(training.step, prepare=training.make),
        "losses": Numbers(training.losses),
    }
    for width in WIDTHS:
        passes = Passes(api, width)
        found[f"backward {width}"] = Work(passes.run)
        found[f"gradients {width}"] = Numbers(passes.numbers)
    for name, size_bytes in SIZES.items():
        found[f"one way {name}"] = sender.one_way(size_bytes)
    return found


class Copies:
    """Copies a tensor into another one."""

    def __init__(self) -> None:
        self._pair = (torch.empty(0), torch.empty(0))

    def work(self, size_bytes: int) -> Work:
        return Work(self._run, prepare=lambda: self._load(size_bytes))

    def _run(self) -> None:
        target, source = self._pair
        target.copy_(source)
        settle()

    def _load(self, size_bytes: int) -> None:
        if self._pair[0].nbytes != size_bytes:
            self._pair = (torch.empty(0), torch.empty(0))
            source = new_tensor(size_bytes)
            self._pair = (torch.empty_like(source), source)
            self._run()


def copy_works() -> dict[str, Work]:
    """Returns the works of a process that copies."""
    copies = Copies()
    run: Callable[[int], Work] = copies.work
    return {f"one way {name}": run(size_bytes) for name, size_bytes in SIZES.items()}
