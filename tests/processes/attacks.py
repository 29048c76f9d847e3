"""Functions and values for the tests of restricted workers; this module is an allowed one."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from os import system
from typing import Any

import torch
from torch import Tensor, nn

from tests.free_encoder import pack_freely
from torchweft import rpc, weights
from torchweft.agent.current import current
from torchweft.rpc import calls, encoding
from torchweft.rpc.worker import current_worker
from torchweft.serialize.objects import Packed, pack

LIMIT_S = 10.0
_ = system  # Imported so that an attacker can try to reach it through this module.


class Payload:
    """Pickles to a call of ``os.system``."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._path}",)


class Bad(ValueError):
    """An error that carries a ``Payload``."""

    def __init__(self, path: str) -> None:
        super().__init__("an error with something in it", Payload(path))
        self.payload = Payload(path)


class Model(nn.Module):
    """A model that the program defines."""

    def __init__(self, rows: int = 5) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 4, sparse=True)
        self.layer = nn.Linear(4, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(self.table(rows))  # type: ignore[no-any-return]


class Counter:
    """A value with methods, some of which other workers may not call."""

    def __init__(self, start: int = 0) -> None:
        self.total = start
        self._secret = "secret"

    @rpc.expose
    def add(self, amount: int) -> int:
        self.total += amount
        return self.total

    def _reset(self) -> None:
        self.total = 0

    def double(self) -> int:
        return 2 * self.total

    @rpc.expose
    def __call__(self, amount: int) -> int:
        return self.add(amount)

    def __len__(self) -> int:
        return self.total


def give(path: str) -> Any:
    return {"result": [Payload(path)]}


def fail_with_payload(path: str) -> None:
    raise Bad(path)


def call_named(to: str, name: bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function of another worker by an arbitrary name."""
    worker = current_worker()
    return calls.call_and_wait(worker, current().find(to), name, args, kwargs, LIMIT_S)


def send_pickle(to: str, value: Any) -> Any:
    """Sends a pickle to a worker that has announced that it reads no pickles."""
    return _send(to, value, functools.partial(pack, main_by_name=False))


def send_freely(to: str, value: Any) -> Any:
    """Sends a worker plain values that no honest worker makes."""
    return _send(to, value, pack_freely)


def _send(to: str, value: Any, packer: Callable[[Any], Packed]) -> Any:
    worker, peer = current_worker(), current().find(to)
    before, encode = peer.pack, encoding.encode
    peer.pack = packer
    encoding.encode = lambda *_: None  # Leaves every value to the packer.
    try:
        return calls.call_and_wait(worker, peer, IDENTITY, (), {"value": value}, LIMIT_S)
    finally:
        peer.pack, encoding.encode = before, encode


IDENTITY = b"tests.processes.functions:identity"


def call_method(method: Any, reference: rpc.RRef[Any], *args: Any) -> Any:
    """Calls a method of a value of this worker, as programs for PyTorch's RPC do."""
    return method(reference.local_value(), *args)


def is_imported(module: str) -> bool:
    return module in sys.modules


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


# Functions for strict workers


def make_counter(start: int) -> Counter:
    return Counter(start)


def gather_with(value: Any) -> dict[str, Any]:
    return rpc.all_gather(value, ["worker0", "worker1"], timeout=LIMIT_S)


def gather_thing() -> dict[str, Any]:
    return gather_with(Counter())


def scale_all(tensors: list[Tensor], factor: float) -> list[Tensor]:
    return [factor * tensor for tensor in tensors]


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("no way back")


def fail_backward(tensor: Tensor) -> Tensor:
    return _NoWayBack.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]


def run_module(module: nn.Module, rows: Tensor) -> Tensor:
    return module(rows).detach()  # type: ignore[no-any-return]


def follow(publisher: rpc.RRef[weights.Publisher] | weights.Publisher) -> int:
    with weights.Subscriber(publisher, {"values": torch.zeros(2)}) as subscriber:
        return subscriber.update(LIMIT_S)
