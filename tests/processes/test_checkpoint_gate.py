"""``StepGate``: snapshots of parameters that several trainers step independently."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.processes.checkpoint_model import Pair, step_half, step_often
from tests.contract.processes.functions import open_gate, raised_by, wait_until
from tests.processes.checkpoint_model_internals import saved_numbers
from torchweft import checkpoint, rpc
from torchweft.engine.worker.current import current
from torchweft.errors import CallTimeout
from torchweft.launch import Cluster

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
]


def test_no_step_of_concurrent_trainers_is_half_in_a_snapshot(
    group: Cluster, tmp_path: Path
) -> None:
    pair = Pair(checkpoint.StepGate())
    arguments = (pair.gate, pair.first, pair.second, 60)
    trainers = [rpc.rpc_async(name, step_often, args=arguments) for name in group.names]
    counts = []
    while not all(trainer.done() for trainer in trainers):
        state = pair.state()
        checkpoint.save(tmp_path, state, step=len(counts), gate=pair.gate, random_states=False)
        counts.append(saved_numbers(tmp_path))
    for trainer in trainers:
        trainer.wait()
    assert all(first == second for first, second in counts), counts
    assert len({first for first, _ in counts}) > 1, counts


def test_a_snapshot_waits_for_a_step_under_way_and_steps_for_the_snapshot(
    group: Cluster, tmp_path: Path
) -> None:
    pair = Pair(checkpoint.StepGate())
    things = (pair.gate, pair.first, pair.second)
    half = rpc.rpc_async("worker0", step_half, args=(*things, "half"))
    wait_until(lambda: float(pair.first.to_here()) == 1, lambda: "the step did not begin")
    with pytest.raises(CallTimeout, match=r"steps are under way on 'worker0'"):
        checkpoint.save(tmp_path, pair.state(), step=0, gate=pair.gate, timeout=0.2)
    assert checkpoint.latest(tmp_path) is None
    # A save that gave up waiting does not keep the gate closed.
    rpc.rpc_sync("worker1", step_often, args=(*things, 1))
    rpc.rpc_sync("worker0", open_gate, args=("half",))
    half.wait()
    checkpoint.save(tmp_path, pair.state(), step=1, gate=pair.gate, random_states=False)
    assert saved_numbers(tmp_path) == (2, 2)
    with pair.gate.closed():
        error = raised_by(pair.gate.step(timeout=0.1).__enter__)
    assert isinstance(error, CallTimeout)
    assert "the gate is closed" in str(error)
    rpc.rpc_sync("worker1", step_often, args=(*things, 1))


def test_a_dropped_gate_is_told_of_no_lost_worker(group: Cluster) -> None:
    watchers = current()._watchers
    before = len(watchers)
    gate = checkpoint.StepGate()
    assert len(watchers) == before + 1
    del gate
    wait_until(lambda: len(watchers) == before, lambda: "it is told for ever")
