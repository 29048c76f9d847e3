"""The program of a strict worker: a few things are registered, everything else is a canary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchweft import rpc

sung: list[str] = []
"""The names of functions that ran although they must not."""
_MOST_ELEMENTS = 1 << 16


def _sing(name: str) -> None:
    sung.append(name)
    raise PermissionError(name)


# Registered


@rpc.register
def identity(*values: Any, **named: Any) -> Any:
    return values, named


@rpc.register
def add(first: Any, second: Any) -> Any:
    for each in (first, second):
        if isinstance(each, Tensor) and each.numel() > _MOST_ELEMENTS:
            raise ValueError("too large for a test")
    return torch.add(first, second)


@rpc.register
async def soon(value: Any) -> Any:
    return value


@rpc.register
def fail(value: Any) -> None:
    raise ValueError(value)


@rpc.register
def ask(worker: str, value: Any) -> Any:
    if worker != "honest":
        raise ValueError("no such worker")
    return rpc.rpc_sync(worker, identity, args=(value,))[0][0]


@rpc.register
def give_trap() -> Any:
    return rpc.RRef(Trap())


@rpc.register
class Net(nn.Module):
    """A module that others may make."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        if width != 2:
            raise ValueError("two are enough")
        self.layer = nn.Linear(width, width)

    def forward(self, rows: Tensor) -> Tensor:
        if not isinstance(rows, Tensor) or rows.numel() > _MOST_ELEMENTS:
            raise ValueError("no rows")
        return self.layer(rows)  # type: ignore[no-any-return]

    def unlisted(self) -> None:
        _sing("Net.unlisted")

    def compile(self, *args: Any, **kwargs: Any) -> None:
        _sing("Net.compile")


@rpc.register
class Counter:
    """An object that others may make, with methods that they may and may not call."""

    def __init__(self, start: Any = 0) -> None:
        self.total = 0

    @rpc.expose
    def add(self, amount: Any = 1) -> int:
        self.total += 1
        return self.total

    @rpc.expose
    def __call__(self) -> int:
        return self.add()

    def reset(self) -> None:
        _sing("Counter.reset")

    def __len__(self) -> int:
        _sing("Counter.__len__")
        return 0


CALLABLES = (torch.mul, torch.optim.SGD, torch.optim.Adam)


# Canaries


def unregistered(*args: Any, **kwargs: Any) -> None:
    _sing("unregistered")


class Unregistered:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _sing("Unregistered")

    @staticmethod
    def make(*args: Any) -> None:
        _sing("Unregistered.make")


class Hidden(nn.Module):
    """A module that no remote module has made."""

    def forward(self, *args: Any) -> None:
        _sing("Hidden.forward")

    def train(self, mode: Any = True) -> Any:
        _sing("Hidden.train")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        _sing("Hidden.state_dict")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        _sing("Hidden.load_state_dict")

    def parameters(self, recurse: bool = True) -> Any:
        _sing("Hidden.parameters")

    def apply(self, fn: Any) -> Any:
        _sing("Hidden.apply")


class Trap:
    """An object on which nothing may be called, not even its hash."""

    def __getattr__(self, name: str) -> Any:
        # A lookup may find attributes of the class, but must not ask the object.
        _sing(f"Trap.{name}")

    def __hash__(self) -> int:
        _sing("Trap.__hash__")
        return 0

    def __eq__(self, other: object) -> bool:
        _sing("Trap.__eq__")
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        _sing("Trap.__call__")

    def __len__(self) -> int:
        _sing("Trap.__len__")
        return 0

    def __iter__(self) -> Any:
        _sing("Trap.__iter__")

    def __bool__(self) -> bool:
        _sing("Trap.__bool__")
        return False

    def __reduce__(self) -> Any:
        _sing("Trap.__reduce__")

    def __repr__(self) -> str:
        _sing("Trap.__repr__")
        return ""

    train = state_dict = load_state_dict = parameters = apply = step = __call__
