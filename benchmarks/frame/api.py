"""One interface to torch's and Weft's RPC library, so that the same program runs on both."""

from __future__ import annotations

import importlib
from typing import Any

# "compat": the modules have torch's names, and are those of ``torchweft.compat``, see ``enter``.
PACKAGES = {"torch": "torch.distributed", "weft": "torchweft", "compat": "torch.distributed"}


class Api:
    """The modules of one library, and the peers in the group.

    Args:
        package: ``torch.distributed`` or ``torchweft``.
        rank: Rank of this worker.
        size: Number of workers in the group.
    """

    def __init__(self, package: str, rank: int, size: int) -> None:
        self.package = package
        self.rank = rank
        self.size = size
        self.rpc: Any = importlib.import_module(f"{package}.rpc")

    @property
    def autograd(self) -> Any:
        return importlib.import_module(f"{self.package}.autograd")

    @property
    def optim(self) -> Any:
        return importlib.import_module(f"{self.package}.optim")

    @property
    def nn(self) -> Any:
        return importlib.import_module(f"{self.package}.nn")

    @property
    def peers(self) -> list[str]:
        """The names of all other workers, by rank."""
        return [worker_name(rank) for rank in range(self.size) if rank != self.rank]


def worker_name(rank: int) -> str:
    """Returns the name of a worker in every group of the benchmarks."""
    return f"worker{rank}"


def enter(name: str, rank: int, size: int) -> Api:
    """Makes a library, ``torch``, ``weft`` or ``compat``, the current one of this process."""
    if name == "compat":
        from torchweft import compat

        compat.install(in_children=False)
    return use(Api(PACKAGES[name], rank, size))


_current: list[Api] = []


def is_joined() -> bool:
    """Whether this process uses a library at all."""
    return bool(_current)


def current() -> Api:
    """Returns the library that this process uses, for functions that are called remotely."""
    return _current[-1]


def use(api: Api) -> Api:
    """Makes ``api`` the current one of this process."""
    _current.append(api)
    return api
