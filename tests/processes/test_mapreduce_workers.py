"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes import mapreduce_functions_m as parts
from tests.contract.processes.functions import options
from tests.contract.processes.mapreduce_gradients import (
    map_and_check,
    on,
)
from tests.contract.processes.test_mapreduce_workers import WORKERS
from tests.processes import mapreduce_internals_m
from torchweft import knobs, mapreduce, rpc
from torchweft.launch import Cluster, Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")


@pytest.mark.parametrize("fan_out", [1, 2, 3])
def test_gradients_along_a_tree(nursery: Nursery, fan_out: int) -> None:
    with (
        torchweft.cluster(workers=5, nursery=nursery, rpc_backend_options=options()) as five,
        knobs.FAN_OUT.override(fan_out),
    ):
        for name in five.names:
            rpc.rpc_sync(name, mapreduce_internals_m.make_counted, args=(["make", "pull"],))
        map_and_check(parts.loss, partitioner=on("driver", *five.names))
        notes = [rpc.rpc_sync(name, parts.take_notes) for name in five.names]
        assert notes == [["make"]] * fan_out + [["pull"]] * (5 - fan_out)


@pytest.fixture(params=["allow-list", "strict"])
def careful(request: pytest.FixtureRequest, nursery: Nursery) -> Iterator[Cluster]:
    how: dict[str, Any] = {"allowed_modules": (mapreduce_internals_m.__name__, "torch")}
    if request.param == "strict":
        how = {"strict": True, "callables": (mapreduce_internals_m.squares,)}
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options(**how)) as group:
        yield group


def test_careful_workers(careful: Cluster) -> None:
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(6, 3, dtype=torch.float64)
    with knobs.FAN_OUT.override(1), torchweft.autograd.context() as context_id:
        loss = mapreduce.remote_sync_call(
            mapreduce_internals_m.squares,
            args=(mapreduce.broadcast({"matrix": weight}), rows),
            partitioner=mapreduce.dim_partitioner(
                0, exclusive=True, keepdim=False, workers=("driver", *WORKERS)
            ),
            reducer=mapreduce.mean_reducer,
        )
        torchweft.autograd.backward(context_id, [loss])
        found = torchweft.autograd.get_gradients(context_id)[weight]
    (expected,) = torch.autograd.grad((rows @ weight.T).square().sum() / 6, weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
