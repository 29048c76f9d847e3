"""Workers that are killed while a map runs, or after they have done their part in it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes import functions
from tests.contract.processes import mapreduce_functions_m as parts
from tests.contract.processes.functions import options
from tests.contract.processes.mapreduce_gradients import (
    check_gradients,
    map_and_check,
    model_and_inputs,
    on,
)
from tests.processes import mapreduce_internals_m as internals
from torchweft import knobs, mapreduce, rpc
from torchweft.errors import WorkerLost
from torchweft.launch import Cluster, Nursery
from torchweft.mapreduce.observers import watching
from torchweft.rpc.worker import current_worker

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
WORKERS = ("worker0", "worker1")


def kill(group: Cluster, name: str) -> None:
    rpc.rpc_sync(name, functions.identity, args=(None,))  # connected: its death is noticed
    os.kill(group.pids[name], signal.SIGKILL)
    internals.wait_lost(name)


@pytest.mark.parametrize(("victim", "fan_out"), [("worker0", 1), ("worker1", 1), ("worker2", 4)])
def test_a_worker_is_killed_while_it_runs_a_part(three: Cluster, victim: str, fan_out: int) -> None:
    with knobs.FAN_OUT.override(fan_out):
        map_and_check(internals.loss_or_die, victim, partitioner=on(*three.names))


class Watching:
    """Kills the victim when its part has ended, and then lets the last part continue."""

    def __init__(self, group: Cluster, victim: str) -> None:
        self.group = group
        self.victim = victim
        self.lost_parts: list[Sequence[int]] = []

    def ended(self, map_id: int, part: int, worker: str, seconds: float) -> None:
        if worker == self.victim and not self.lost_parts and part != 2:
            os.kill(self.group.pids[worker], signal.SIGKILL)
            functions.open_gate(f"kill {worker}")

    def lost(self, map_id: int, worker: str, parts: Sequence[int]) -> None:
        assert worker == self.victim
        self.lost_parts.append(parts)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_worker_is_killed_when_it_has_done_its_part(three: Cluster, is_recorded: bool) -> None:
    model, inputs = model_and_inputs(3)
    observer = Watching(three, "worker1")
    watching.append(observer)
    with torchweft.autograd.context() as context_id, torch.set_grad_enabled(is_recorded):
        loss = mapreduce.remote_sync_call(
            internals.loss_and_kill,
            args=(model, inputs, torch.arange(3), "worker1"),
            partitioner=on("worker0", "worker1", "worker2"),
            reducer=mapreduce.mean_reducer,
        )
        if is_recorded:
            torchweft.autograd.backward(context_id, [loss])
            found = torchweft.autograd.get_gradients(context_id)
    watching.remove(observer)
    assert observer.lost_parts == [(1,) if is_recorded else ()]
    assert sorted(parts.take_notes()) == ([0, 1, 1, 2] if is_recorded else [0, 1, 2])
    if is_recorded:
        check_gradients(model, inputs, found)


def test_a_part_that_calls_a_lost_worker_fails_itself(three: Cluster) -> None:
    kill(three, "worker2")
    with pytest.raises(WorkerLost) as caught:
        mapreduce.remote_sync_call(
            internals.call_other,
            args=(torch.arange(2), "worker2"),
            partitioner=on(*WORKERS),
            timeout=20.0,
        )
    assert caught.value.worker == "worker2"
    assert "part" in caught.value.__notes__[-1]
    notes = parts.take_notes()
    assert len(notes) == len(set(notes)), "no part has run twice"


def test_running_a_map_again_after_a_loss(three: Cluster) -> None:
    model, inputs = model_and_inputs()
    with torchweft.autograd.context() as context_id:
        mapreduce.remote_sync_call(parts.loss, args=(model, inputs), partitioner=on(*three.names))
        context = rpc_contexts().get(context_id)
        (held,) = context.recomputable
        kill(three, "worker1")
        held.compute_again()
        again = list(held.replaced.values())
        torchweft.autograd.backward(context_id, [torch.stack(again).mean()])
        found = torchweft.autograd.get_gradients(context_id)
    assert not context.recomputable
    check_gradients(model, inputs, found)


def rpc_contexts() -> Any:

    return current_worker().contexts


@pytest.mark.parametrize("fan_out", [1, 2])
def test_gradients_along_a_tree(nursery: Nursery, fan_out: int) -> None:
    with (
        torchweft.cluster(workers=5, nursery=nursery, rpc_backend_options=options()) as five,
        knobs.FAN_OUT.override(fan_out),
    ):
        for name in five.names:
            rpc.rpc_sync(name, internals.make_counted, args=(["make", "pull"],))
        map_and_check(parts.loss, partitioner=on("driver", *five.names))
        notes = [rpc.rpc_sync(name, parts.take_notes) for name in five.names]
        assert notes == [["make"]] * fan_out + [["pull"]] * (5 - fan_out)


@pytest.fixture(params=["allow-list", "strict"])
def careful(request: pytest.FixtureRequest, nursery: Nursery) -> Iterator[Cluster]:
    how: dict[str, Any] = {"allowed_modules": (internals.__name__, "torch")}
    if request.param == "strict":
        how = {"strict": True, "callables": (internals.squares,)}
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options(**how)) as group:
        yield group


def test_careful_workers(careful: Cluster) -> None:
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(6, 3, dtype=torch.float64)
    with knobs.FAN_OUT.override(1), torchweft.autograd.context() as context_id:
        loss = mapreduce.remote_sync_call(
            internals.squares,
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
