"""A second-order MAML meta-step on sinusoids: by a map, by calls, or in one process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.frame.work import Numbers, Work

TASKS = 25
SHOTS = 10
RATE = 0.01
UNITS = {"step": 40, "large step": 1000}
SEEDS = torch.arange(TASKS)

Step = Callable[[nn.Module], "list[Tensor]"]
"""Returns the gradients of a network's parameters."""


def network(units: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(1, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, 1)
    ).double()


def draw(seed: int) -> tuple[Tensor, Tensor]:
    """Returns inputs and values of a sinusoid, (2, SHOTS, 1) each."""
    generator = torch.Generator().manual_seed(seed)
    amplitude, phase = torch.rand(2, generator=generator, dtype=torch.float64)
    inputs = torch.rand(2, SHOTS, 1, generator=generator, dtype=torch.float64) * 10 - 5
    return inputs, (0.1 + 4.9 * amplitude) * torch.sin(inputs - torch.pi * phase)


def query_error(model: nn.Module, weights: Mapping[str, Tensor], seed: int) -> Tensor:
    """Returns the error of a model after one inner step."""
    inputs, goals = draw(seed)

    def error(weights: Mapping[str, Tensor], which: int) -> Tensor:
        difference: Tensor = functional_call(model, dict(weights), (inputs[which],)) - goals[which]
        return difference.square().mean()

    leaves = list(weights.values())
    gradients = torch.autograd.grad(error(weights, 0), leaves, create_graph=True)
    steps = zip(weights.items(), gradients, strict=True)
    return error({name: value - RATE * gradient for (name, value), gradient in steps}, 1)


def works(step: Step) -> dict[str, Work | Numbers]:
    """Returns the meta-steps as works, and the gradients that are compared before."""
    models = {name: network(units) for name, units in UNITS.items()}
    found: dict[str, Work | Numbers] = {}
    for name, model in models.items():
        found[name] = Work(functools.partial(step, model))
        found[f"{name} gradients"] = Numbers(functools.partial(_numbers, step, model))
    return found


def _numbers(step: Step, model: nn.Module) -> list[float]:
    return [gradient.norm().item() for gradient in step(model)]


# By a map


def error_of_part(model: nn.Module, seed: Tensor) -> Tensor:
    return query_error(model, dict(model.named_parameters()), int(seed))


def by_map(autograd: Any, mapreduce: Any, workers: list[str]) -> Step:
    partitioner = mapreduce.dim_partitioner(0, exclusive=True, keepdim=False, workers=workers)

    def step(model: nn.Module) -> list[Tensor]:
        with autograd.context() as context_id:
            error = mapreduce.remote_sync_call(
                error_of_part,
                args=(model, SEEDS),
                partitioner=partitioner,
                reducer=mapreduce.mean_reducer,
            )
            return list(mapreduce.autograd.grad(context_id, error, model.parameters()))

    return step


# By a call for each task


class _Networks(threading.local):
    """Networks of each thread, since ``functional_call`` changes its module while it runs."""

    def __init__(self) -> None:
        self.by_units = {units: network(units) for units in UNITS.values()}


_networks = _Networks()


def error_of_call(units: int, weights: dict[str, Tensor], seed: int) -> Tensor:
    return query_error(_networks.by_units[units], weights, seed)


def by_calls(rpc: Any, autograd: Any, workers: list[str]) -> Step:
    def step(model: nn.Module) -> list[Tensor]:
        parameters = dict(model.named_parameters())
        units = len(parameters["0.bias"])
        with autograd.context() as context_id:
            # torch's calls take parameters out of the graph.
            weights = {name: each.view_as(each) for name, each in parameters.items()}
            futures = [
                rpc.rpc_async(
                    workers[seed % len(workers)], error_of_call, args=(units, weights, seed)
                )
                for seed in range(TASKS)
            ]
            error = torch.stack([future.wait() for future in futures]).mean()
            autograd.backward(context_id, [error])
            found = autograd.get_gradients(context_id)
        return [found[each] for each in parameters.values()]

    return step


# In one process


def alone(model: nn.Module) -> list[Tensor]:
    parameters = dict(model.named_parameters())
    errors = [query_error(model, parameters, seed) for seed in range(TASKS)]
    error = torch.stack(errors).mean()
    return list(torch.autograd.grad(error, list(parameters.values())))
