"""The parameters of a meta-step travel once to each worker, and their gradients once back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes import meta_gradient_functions as functions
from tests.contract.processes.functions import options
from tests.internal import overridden
from tests.thorough import spread
from torchweft import knobs, mapreduce, rpc
from torchweft.engine.worker.connections import Traffic
from torchweft.launch import Cluster, Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
WORKERS = ("worker0", "worker1", "worker2")
TASKS = torch.arange(6)
UNITS = 1000
WITHIN = 0.05
WAYS: dict[str, dict[str, str]] = {
    "shared memory": {},
    "TCP": {"WEFT_SHM_LIMIT_BYTES": "0", **overridden(UNIX_SOCKETS=0, CMA_FROM_BYTES=1 << 60)},
}

CHILDREN = {1: (1, 1, 1, 0), 2: (2, 1, 0, 0), 4: (3, 0, 0, 0)}
"""For each FAN_OUT: to how many workers the caller and each other worker send the parameters."""


class Moved(NamedTuple):
    """Bytes that a worker has sent and received, as multiples of the size of the parameters."""

    sent: float
    received: float


@pytest.fixture(scope="module", params=WAYS)
def three(request: pytest.FixtureRequest, nursery: Nursery) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WAYS[request.param].items():
            patch.setenv(name, value)
        with torchweft.cluster(workers=3, nursery=nursery, rpc_backend_options=options()) as group:
            yield group


def large_network() -> nn.Module:
    """Returns a network with 8 MB of parameters."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(1, UNITS), nn.ReLU(), nn.Linear(UNITS, UNITS), nn.ReLU(), nn.Linear(UNITS, 1)
    ).double()


def error_after_a_step(model: nn.Module, seeds: Tensor) -> Tensor:
    """Returns the mean query error over tasks, after one inner step each; second order."""
    weights = dict(model.named_parameters())
    errors = []
    for seed in seeds:
        inputs, goals = functions.draw(int(seed))
        inner = functions.error(model, weights, inputs[0], goals[0])
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        steps = zip(weights.items(), gradients, strict=True)
        stepped = {name: value - 1e-3 * gradient for (name, value), gradient in steps}
        errors.append(functions.error(model, stepped, inputs[1], goals[1]))
    return torch.stack(errors).mean()


def traffic(names: list[str]) -> dict[str, Traffic]:
    return {name: rpc.rpc_sync(name, rpc.traffic) for name in names}


def moved(before: dict[str, Traffic], size_bytes: int) -> dict[str, Moved]:
    after = traffic(list(before))
    return {
        name: Moved(
            (after[name].bytes_sent - earlier.bytes_sent) / size_bytes,
            (after[name].bytes_received - earlier.bytes_received) / size_bytes,
        )
        for name, earlier in before.items()
    }


@pytest.mark.parametrize(("fan_out", "way"), spread([1, 2, 4], ["backward", "grad"]))
def test_a_meta_step(three: Cluster, fan_out: int, way: str) -> None:
    model = large_network()
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    names = [three.name, *three.names]
    with knobs.FAN_OUT.override(fan_out), torchweft.autograd.context() as context_id:
        before = traffic(names)
        error = mapreduce.remote_sync_call(
            error_after_a_step,
            args=(model, TASKS),
            partitioner=mapreduce.dim_partitioner(0, exclusive=True, workers=WORKERS),
            reducer=mapreduce.mean_reducer,
        )
        forward = moved(before, size_bytes)
        before = traffic(names)
        if way == "grad":
            mapreduce.autograd.grad(context_id, error, model.parameters())
        else:
            mapreduce.autograd.backward(context_id, error)
        backward = moved(before, size_bytes)
    # Each worker receives the parameters once, and sends them to each of its children.
    children = dict(zip(names, CHILDREN[fan_out], strict=True))
    for name, count in children.items():
        own = 0 if name == three.name else 1
        assert forward[name] == pytest.approx((count, own), rel=WITHIN, abs=WITHIN)
        assert backward[name] == pytest.approx((own, count), rel=WITHIN, abs=WITHIN)
