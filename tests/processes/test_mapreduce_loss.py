"""Workers that are killed while a map runs, or after they have done their part in it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes import functions
from tests.contract.processes import mapreduce_functions_m as parts
from tests.contract.processes.mapreduce_gradients import (
    check_gradients,
    map_and_check,
    model_and_inputs,
    on,
)
from tests.processes import mapreduce_internals_m as internals
from torchweft import knobs, mapreduce, rpc
from torchweft.errors import WorkerLost
from torchweft.launch import Cluster
from torchweft.mapreduce.observers import watching
from torchweft.rpc.worker import current_worker

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
WORKERS = ("worker0", "worker1")


def kill(group: Cluster, name: str) -> None:
    rpc.rpc_sync(name, functions.identity, args=(None,))  # connected: its death is noticed
    os.kill(group.pids[name], signal.SIGKILL)
    internals.wait_lost(name)


@pytest.mark.parametrize("fan_out", [1, 4])
@pytest.mark.parametrize("victim", ["worker0", "worker1", "worker2"])
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


def test_parts_are_not_run_again_unless_that_is_wanted(three: Cluster) -> None:
    def cut(model: nn.Module, inputs: Tensor, victim: str) -> list[tuple[Any, Any, Any]]:
        return [(place % 3 + 1, (model, row, victim), {}) for place, row in enumerate(inputs)]

    model, inputs = model_and_inputs()
    with pytest.raises(WorkerLost) as caught:
        mapreduce.remote_sync_call(
            internals.loss_or_die, args=(model, inputs, "worker0"), partitioner=cut
        )
    assert caught.value.worker == "worker0"
    assert "rerun=True" in caught.value.__notes__[-1]
    map_and_check(internals.loss_or_die, "worker1", partitioner=cut_rows, rerun=True)


def cut_rows(model: nn.Module, inputs: Tensor, victim: str) -> list[tuple[Any, Any, Any]]:
    rows = inputs.split(1)
    return [(place % 2 + 2, (model, row, victim), {}) for place, row in enumerate(rows)]


def test_nobody_is_left(three: Cluster) -> None:
    model, inputs = model_and_inputs()
    with pytest.raises(WorkerLost) as caught:
        mapreduce.remote_sync_call(
            internals.loss_or_die,
            args=(model, inputs, "worker2"),
            partitioner=on("worker2"),
        )
    assert caught.value.worker == "worker2"
    assert "no worker is left" in caught.value.__notes__[-1]


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


@pytest.mark.parametrize("is_known", [True, False])
def test_a_worker_was_killed_before(three: Cluster, is_known: bool) -> None:
    if is_known:
        kill(three, "worker0")
    else:
        os.kill(three.pids["worker0"], signal.SIGKILL)
    map_and_check(parts.loss, partitioner=on(*three.names))
    map_and_check(parts.loss, partitioner=on("worker0", "worker1"))


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
