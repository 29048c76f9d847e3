"""Functions that read internals; ``meta_gradient_functions.py`` in the contract has the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes.meta_gradient_functions import (
    Doom,
    Weights,
    descended,
    draw,
    error,
    mortal,
)
from torchweft import mapreduce, rpc
from torchweft.engine.worker.current import current


class Inner(NamedTuple):
    """How the inner error is computed.

    Attributes:
        workers: Workers of a map, None for all; if empty, a call to the next worker instead.
        doom: Deaths of workers meanwhile.
    """

    workers: tuple[str, ...] | None
    doom: Doom


def query_error_by_others(model: nn.Module, seeds: Tensor, inner: Inner) -> Tensor:
    """Returns the mean query error of a part's tasks; other workers compute the inner error."""
    inner.doom.strike("begin")
    mean = torch.stack([_by_others(model, int(seed), inner) for seed in seeds]).mean()
    return mortal(mean, inner.doom, "backward")


def _by_others(model: nn.Module, seed: int, inner: Inner) -> Tensor:
    inputs, goals = draw(seed)
    context_id = torchweft.autograd.current_context_id()
    compute = _mapped if inner.workers != () else _called

    def gradients(weights: Weights) -> Sequence[Tensor]:
        inner_error = compute(inner, model, weights, inputs[0], goals[0])
        leaves = list(weights.values())
        if compute is _called:
            return torchweft.autograd.grad(context_id, inner_error, leaves, create_graph=True)
        return mapreduce.autograd.grad(context_id, inner_error, leaves, create_graph=True)

    weights = descended(dict(model.named_parameters()), gradients)
    return error(model, weights, inputs[1], goals[1])


def _called(
    inner: Inner, model: nn.Module, weights: Weights, inputs: Tensor, goals: Tensor
) -> Tensor:
    others = [peer.name for peer in current().members.present() if peer.lost is None]
    after = (others.index(rpc.get_worker_info().name) + 1) % len(others)
    return rpc.rpc_sync(others[after], inner_error, (model, weights, inputs, goals, inner.doom))


def _mapped(
    inner: Inner, model: nn.Module, weights: Weights, inputs: Tensor, goals: Tensor
) -> Tensor:
    whole = {name: mapreduce.broadcast(value) for name, value in weights.items()}
    if inner.workers is None:
        mapped: Tensor = mapped_error(model, whole, inputs, goals, inner.doom)
        return mapped
    mapped = mapreduce.remote_sync_call(
        inner_error,
        args=(model, whole, inputs, goals, inner.doom),
        partitioner=mapreduce.dim_partitioner(0, workers=inner.workers),
        reducer=mapreduce.mean_reducer,
    )
    return mapped


def inner_error(
    model: nn.Module, weights: Weights, inputs: Tensor, goals: Tensor, doom: Doom
) -> Tensor:
    """Runs on another worker, or for parts of inputs and goals on several workers."""
    doom.strike("inner begin")
    return mortal(error(model, weights, inputs, goals), doom, "inner backward")


@mapreduce.parallelize()
def mapped_error(
    model: nn.Module, weights: Weights, inputs: Tensor, goals: Tensor, doom: Doom
) -> Tensor:
    return inner_error(model, weights, inputs, goals, doom)
