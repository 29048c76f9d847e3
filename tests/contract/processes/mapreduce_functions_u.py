"""Functions for workers of open groups that begin maps, or run their parts."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from tests.contract.processes.functions import wait_until
from tests.contract.processes.mapreduce_functions_m import loss
from tests.contract.processes.mapreduce_gradients import model_and_inputs, single_gradients
from torchweft import mapreduce, rpc
from torchweft.mapreduce import autograd

LIMIT_S = 20.0
each_row = mapreduce.dim_partitioner(0, exclusive=True, keepdim=True)
kept: dict[str, Any] = {}


def on(names: list[str]) -> Any:
    return mapreduce.dim_partitioner(0, exclusive=True, keepdim=True, workers=names)


def join(name: str, rank: int, method: str) -> None:
    """Joins an open group."""
    options = rpc.RpcBackendOptions(init_method=method, init_timeout=LIMIT_S, rpc_timeout=LIMIT_S)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)


def leave() -> None:
    rpc.shutdown(timeout=LIMIT_S)


def life_of(value: Tensor) -> tuple[str, int]:
    """Returns the name of the worker that runs a part, and how many parts it has run."""
    kept["parts"] = kept.get("parts", 0) + 1
    return rpc.get_worker_info().name, kept["parts"]


def lives(rows: int, names: list[str] | None = None) -> list[tuple[str, int]]:
    """Maps ``life_of`` over rows on the named workers, or on all; returns the results."""
    found: list[tuple[str, int]] = mapreduce.remote_sync_call(
        life_of, args=(torch.zeros(rows),), partitioner=each_row if names is None else on(names)
    )
    return found


def know(*names: str) -> None:
    """Waits until this worker knows exactly these workers."""

    def known() -> set[str]:
        return {info.name for info in rpc.get_worker_infos()}

    wait_until(lambda: known() == set(names), lambda: f"known are {known()}")


# A step of training in two halves, so that workers may come and go between them


def forward(names: list[str] | None, rows: int) -> None:
    model, inputs = model_and_inputs(rows)
    stack = contextlib.ExitStack()
    context_id = stack.enter_context(autograd.context())
    total = mapreduce.remote_sync_call(
        loss,
        args=(model, inputs),
        partitioner=each_row if names is None else on(names),
        reducer=mapreduce.mean_reducer,
    )
    kept["step"] = stack, context_id, total, model, inputs


def backward() -> float:
    """Returns the largest difference between the gradients and those of a single process."""
    stack, context_id, total, model, inputs = kept.pop("step")
    with stack:
        autograd.backward(context_id, total)
    expected = single_gradients(model, [loss(model, row) for row in inputs.split(1)])
    pairs = zip(model.parameters(), expected, strict=True)
    return max((parameter.grad - gradient).abs().max().item() for parameter, gradient in pairs)


# A worker that leaves while it has parts to run


def maps_until_others_left(*left: str) -> int:
    """Maps on all workers repeatedly until only ``left`` remain; returns how often."""
    count = 0
    while {info.name for info in rpc.get_worker_infos()} != set(left):
        found = mapreduce.remote_sync_call(double, args=(torch.arange(12.0),))
        assert torch.equal(torch.cat(found), torch.arange(12.0) * 2)
        count += 1
        rpc.rpc_sync(left[-1], note_map)
    return count


def double(value: Tensor) -> Tensor:
    return value * 2


def note_map() -> None:
    kept["maps"] = kept.get("maps", 0) + 1


def wait_for_maps(count: int) -> None:
    begin = kept.get("maps", 0)
    wait_until(lambda: kept.get("maps", 0) >= begin + count, lambda: "nobody maps")
