"""Weights by version, where samplers are as on other hosts: copies, deltas, and slow samplers."""

from __future__ import annotations

import pytest
import torch

from tests.contract.processes import functions
from tests.contract.processes.functions import wait_until
from tests.processes.weights_functions import LIMIT_S, Model, Sampler, Trainer
from torchweft import rpc
from torchweft.engine.worker.current import current
from torchweft.launch import Cluster
from torchweft.rpc import RRef
from torchweft.weights import Publisher

pytestmark = pytest.mark.keeps("threads", "descriptors")

WORKERS = ["worker0", "worker1"]


@pytest.fixture
def apart(group: Cluster) -> Cluster:
    """The same group, where the driver's tensors travel as to another host."""
    for name in group.names:
        rpc.rpc_sync(name, functions.name_here)
        ways = current().find(name).ways
        ways.give_up("cma", "forbidden by a test")
        ways.give_up("shm", "forbidden by a test")
    return group


def test_samplers_of_other_hosts_get_a_copy_each_then_deltas(apart: Cluster) -> None:
    model = Model()
    publisher = Publisher(model, dtype=torch.bfloat16, deltas=1)
    reference = RRef(publisher)
    samplers = rpc.actors(WORKERS, Sampler, reference, dtype=torch.bfloat16)
    size_bytes = publisher._layout.size_bytes
    before = rpc.traffic().bytes_sent
    model.set_to(1)
    publisher.publish()
    assert samplers.rpc_sync(Sampler.update, LIMIT_S) == [1, 1]
    assert 2 * size_bytes < rpc.traffic().bytes_sent - before < 2.05 * size_bytes
    with torch.no_grad():
        model.first.weight[::50, ::7] += 0.01
    before = rpc.traffic().bytes_sent
    publisher.publish()
    statistics = publisher.statistics()
    wait_until(lambda: publisher.statistics().deltas == 2, lambda: f"no deltas: {statistics}")
    assert publisher.statistics().wholes == 2
    assert rpc.traffic().bytes_sent - before < 0.05 * size_bytes
    expected = model.first.weight.detach().to(torch.bfloat16)
    for each in samplers:
        assert torch.equal(rpc.rpc_sync(each.owner(), take_weights, (each,)), expected)
    samplers.rpc_sync(Sampler.close)


def take_weights(sampler: RRef[Sampler]) -> torch.Tensor:
    found = sampler.local_value()
    while found.subscriber.version != 2:
        found.subscriber.update(LIMIT_S)
    return found.model.first.weight.detach().clone()


def test_a_slow_sampler_skips_versions_and_wastes_no_bytes(apart: Cluster) -> None:
    trainer = Trainer()
    sampler = rpc.remote("worker0", Sampler, (trainer.reference(),))
    trainer.train()
    assert sampler.rpc_sync().update(LIMIT_S) == 1
    trainer.train(20)
    taken = sampler.rpc_sync().update_to(21)
    assert len(taken) <= 3
    assert trainer.statistics().wholes == 1 + len(taken)
    sampler.rpc_sync().close()


def test_a_base_that_was_changed_is_noticed(apart: Cluster) -> None:
    trainer = Trainer(deltas=1)
    reference = rpc.remote("worker0", Sampler, (trainer.reference(),))
    trainer.train()
    assert reference.rpc_sync().update(LIMIT_S) == 1
    reference.rpc_sync().damage()
    with torch.no_grad():
        trainer.model.second.bias.fill_(2)
    trainer.publisher.publish()
    wait_until(lambda: reference.rpc_sync().statistics().wholes == 2, lambda: "no whole weights")
    statistics = reference.rpc_sync().statistics()
    assert (statistics.refused, statistics.deltas) == (1, 0)
    reference.rpc_sync().close()
