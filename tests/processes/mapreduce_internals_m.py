"""Functions that read internals; ``mapreduce_functions_m.py`` in the contract has the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.contract.processes import functions
from tests.contract.processes.functions import wait_until
from tests.contract.processes.mapreduce_functions_m import double, loss, note
from torchweft import rpc
from torchweft.engine.worker.current import current
from torchweft.mapreduce import shared


def squares(weights: dict[str, Tensor], row: Tensor) -> Tensor:
    return (weights["matrix"] @ row).square().sum()


def make_counted(names: list[str]) -> None:
    """Makes this worker note each later call of the named functions of ``shared``."""
    for name in names:
        setattr(shared, name, _counted(getattr(shared, name)))


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*args: Any) -> Any:
        note(function.__name__)
        return function(*args)

    return counting


def loss_or_die(model: nn.Module, inputs: Tensor, victim: str) -> Tensor:
    """Computes the loss, but kills the process on the victim."""
    if rpc.get_worker_info().name == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(model, inputs)


def loss_and_kill(model: nn.Module, inputs: Tensor, number: Tensor, victim: str) -> Tensor:
    """The last part ends when the victim is known to be lost; the other parts end before."""
    rpc.rpc_sync("driver", note, args=(int(number),))
    if int(number) == 2:
        rpc.rpc_sync("driver", functions.pass_gate, args=(f"kill {victim}",))
        rpc.rpc_sync("driver", wait_lost, args=(victim,))
    return loss(model, inputs)


def wait_lost(name: str) -> None:
    peer = current().find(name)
    wait_until(lambda: peer.lost is not None, lambda: f"{name} is not lost")


def call_other(value: Tensor, name: str) -> Tensor:
    rpc.rpc_sync("driver", note, args=(int(value),))
    return rpc.rpc_sync(name, double, args=(value,))
