"""Functions for workers in the tests of maps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.contract.processes import functions
from tests.contract.processes.functions import wait_until
from torchweft import mapreduce, rpc

runs: list[Any] = []
"""The notes of parts that ran here."""


def note(what: Any) -> None:
    runs.append(what)


def take_notes() -> list[Any]:
    taken = runs.copy()
    runs.clear()
    return taken


def double(value: Tensor) -> Tensor:
    return value * 2


def where(value: Tensor) -> str:
    return rpc.get_worker_info().name


def loss(model: nn.Module, inputs: Tensor) -> Tensor:
    result: Tensor = model(inputs).square().mean()
    return result


def loss_with(model: nn.Module, others: list[Tensor], inputs: Tensor) -> Tensor:
    """Adds the sums of ``others``, which must be the model's parameters, to the loss."""
    assert [id(each) for each in others] == [id(each) for each in model.parameters()]
    assert all(isinstance(each, nn.Parameter) for each in others)
    return loss(model, inputs) + sum(each.sum() for each in others)


def spoil(model: nn.Module, inputs: Tensor) -> float:
    """Returns the loss of a part, then zeroes the model's parameters and the part."""
    result = loss(model, inputs).item()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        inputs.zero_()
    return result


def fail_at(value: Tensor, bad: int) -> Tensor:
    if int(value) == bad:
        raise KeyError(f"no part {bad}")
    return value


def fail_or_wait(value: Tensor, gate: str) -> Tensor:
    """Part 0 fails when part 1 has begun; part 1 waits until it is cancelled."""
    if int(value) == 0:
        rpc.rpc_sync("driver", functions.pass_gate, args=(gate,))
        raise KeyError("part 0")
    with rpc.detached():  # The part may be cancelled before the answer comes.
        rpc.rpc_sync("driver", functions.open_gate, args=(gate,))
    wait_until(rpc.is_cancelled, lambda: "nobody has cancelled this")
    with rpc.detached():
        rpc.rpc_sync("driver", functions.open_gate, args=(f"{gate} cancelled",))
    return value


def hold(value: Tensor, gate: str) -> Tensor:
    """Waits for a gate of the driver."""
    rpc.rpc_sync("driver", functions.pass_gate, args=(gate,))
    return value


def wait_for_the_others(value: Tensor, gate: str) -> str:
    """Part 0 waits until all other parts have run, on any worker."""
    if int(value) == 0:
        rpc.rpc_sync("driver", functions.pass_gate, args=(gate,))
    else:
        rpc.rpc_sync("driver", note, args=(int(value),))
        rpc.rpc_sync("driver", open_when_all_have_run, args=(gate,))
    return rpc.get_worker_info().name


def open_when_all_have_run(gate: str) -> None:
    if len(runs) == 7:
        functions.open_gate(gate)


def map_on(value: Tensor, depth: int) -> float:
    """Sums a tensor, cut into a part for each worker ``depth`` times."""
    if not depth or len(value) < 2:
        return value.sum().item()
    total: float = mapreduce.remote_sync_call(
        map_on, args=(value, depth - 1), reducer=sum, partitioner=mapreduce.batch_partitioner
    )
    return total


async def soon(value: Tensor) -> Tensor:
    return value + 1


@rpc.async_execution
def later(value: Tensor) -> torch.futures.Future[Tensor]:
    return rpc.rpc_async("driver", double, args=(value,))


@mapreduce.parallelize()
def mean_of_squares(model: nn.Module, inputs: Tensor) -> Tensor:
    return loss(model, inputs)


@mapreduce.parallelize_async(reducer=mapreduce.sum_reducer, partitioner=mapreduce.batch_partitioner)
def sum_later(inputs: Tensor) -> Tensor:
    return inputs.sum()


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @mapreduce.parallelize(mapreduce.batch_partitioner, sum)
    def total(self, inputs: Tensor) -> float:
        return self.factor * inputs.sum().item()
