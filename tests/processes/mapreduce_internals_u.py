"""Functions that read internals; ``mapreduce_functions_u.py`` in the contract has the others."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes.mapreduce_functions_u import LIMIT_S, leave, on
from torchweft import mapreduce, rpc

asked = threading.Event()

leaving = threading.Event()


def leave_with_a_part() -> None:
    """Leaves as soon as it has a part to run."""
    assert asked.wait(LIMIT_S), "no part has come"
    leaving.set()
    leave()
    asked.clear()
    leaving.clear()


def square_as_one_leaves(weight: nn.Parameter, row: Tensor, leaver: str) -> Tensor:
    if rpc.get_worker_info().name == leaver:
        asked.set()
        assert leaving.wait(LIMIT_S), "nobody has said that it is to leave"
    return (weight * row).square().sum()


def map_as_one_leaves(leaver: str, names: list[str], rows: int, fan_out: int) -> list[float]:
    """Returns the results of a map, during which a worker leaves."""
    weight, inputs = nn.Parameter(torch.ones(2)), torch.arange(2.0 * rows).view(rows, 2)
    with torchweft.knobs.FAN_OUT.override(fan_out):
        found = mapreduce.remote_sync_call(
            square_as_one_leaves,
            args=(mapreduce.broadcast(weight), inputs, leaver),
            partitioner=on(names),
        )
    return [each.item() for each in found]
