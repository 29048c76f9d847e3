"""Publishers and samplers that are killed, at named points and at any byte, or on other hosts."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.functions import options, stop, wait_until
from tests.processes import internals
from tests.processes.weights_functions import (
    LIMIT_S,
    Model,
    Sampler,
    Trainer,
    die_at,
    die_when_switching,
)
from torchweft import rpc
from torchweft.engine.worker.current import current
from torchweft.errors import WorkerLost
from torchweft.launch import Cluster, Nursery
from torchweft.rpc import RRef
from torchweft.weights import Publisher, publisher

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")

SAMPLERS = ["worker1", "worker2"]
LARGE = 3000


def begin(trainer_at: str, *, is_apart: bool, size: int = 512, **given: Any) -> RRef[Trainer]:
    """Places a trainer; ``is_apart`` makes its tensors travel as to another host."""
    trainer = rpc.remote(trainer_at, Trainer, (size,), given)
    if is_apart:
        for name in ("driver", *SAMPLERS):
            rpc.rpc_sync(trainer_at, rpc.rpc_sync, (name, functions.name_here))
            rpc.rpc_sync(trainer_at, internals.forbid, (name, "shm", "cma"))
    return trainer


@pytest.mark.parametrize(
    ("point", "is_apart", "latest"),
    [
        ("in the middle of the copy", False, 1),
        ("before the announcement", False, 1),
        ("in the middle of a delta", True, 1),
        ("in the transfer of a delta", True, 1),
        ("before the answer", True, 1),
    ],
)
def test_samplers_of_a_killed_publisher_keep_a_whole_version(
    nursery: Nursery, point: str, is_apart: bool, latest: int
) -> None:
    with torchweft.cluster(workers=3, nursery=nursery, rpc_backend_options=options(), check=False):
        trainer = begin("worker0", is_apart=is_apart, deltas=1)
        reference = trainer.rpc_sync().reference()
        samplers = rpc.actors(SAMPLERS, Sampler, reference)
        trainer.rpc_sync().train()
        assert samplers.rpc_sync(Sampler.update, LIMIT_S) == [1, 1]
        rpc.rpc_sync("worker0", die_at, (point,))
        try:
            trainer.rpc_sync().train()
        except WorkerLost:
            pass  # At some points it ends before it can answer.
        for sampler in samplers:
            wait_until(lambda: sampler.rpc_sync().lost() == "worker0", lambda: "not noticed")  # noqa: B023
            assert sampler.rpc_sync().update() == latest
            with pytest.raises(WorkerLost, match="worker0"):
                sampler.rpc_sync().update(LIMIT_S)
            assert sampler.rpc_sync().check() == latest

        # From a snapshot, on another worker; its numbers may have been used before.
        other = begin("worker1", is_apart=is_apart, after=1, deltas=1)
        restarted = other.rpc_sync().reference()
        samplers.rpc_sync(Sampler.follow, restarted)
        other.rpc_sync().train(2)
        assert [taken[-1] for taken in samplers.rpc_sync(Sampler.update_to, 3)] == [3, 3]


@pytest.mark.parametrize("share", [0.02, 0.6])
def test_a_publisher_killed_in_the_middle_of_a_transfer(nursery: Nursery, share: float) -> None:
    with torchweft.cluster(
        workers=3, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        trainer = begin("worker0", is_apart=True, size=LARGE)
        # Behind the message: only there do the counters follow the bytes as they come.
        rpc.rpc_sync("worker0", internals.forbid, ("driver", "striped"))
        sampler = Sampler(trainer.rpc_sync().reference(), LARGE)
        trainer.rpc_sync().train()
        assert sampler.update(LIMIT_S) == 1
        size_bytes = 4 * LARGE * LARGE
        before = rpc.traffic().bytes_received
        training = trainer.rpc_async().train()
        enough, end_s = before + share * size_bytes, time.monotonic() + LIMIT_S
        while rpc.traffic().bytes_received < enough:
            assert time.monotonic() < end_s, "nothing is sent"
            time.sleep(0)  # Lets the threads run that receive.
        os.kill(group.pids["worker0"], signal.SIGKILL)
        try:
            training.wait()
        except WorkerLost:
            pass
        wait_until(lambda: sampler.lost() == "worker0", lambda: "not noticed")
        assert sampler.update() in (1, 2)  # Which also compares every value with the version.
        sampler.close()


def test_a_killed_sampler_keeps_nobody_from_anything(nursery: Nursery) -> None:
    with torchweft.cluster(workers=3, nursery=nursery, rpc_backend_options=options(), check=False):
        trainer = Trainer()
        samplers = rpc.actors(SAMPLERS, Sampler, trainer.reference())
        trainer.train()
        assert samplers.rpc_sync(Sampler.update, LIMIT_S) == [1, 1]
        rpc.rpc_sync("worker1", die_when_switching)
        trainer.train()
        with pytest.raises(WorkerLost, match="worker1"):
            samplers[0].rpc_sync().update(LIMIT_S)
        assert trainer.train(5) == 7
        assert samplers[1].rpc_sync().update_to(7)[-1] == 7
        wait_until(
            lambda: len(trainer.publisher._subscriptions) == 1, lambda: "the dead one is told"
        )


def test_a_stopped_sampler_delays_no_training(nursery: Nursery) -> None:
    with torchweft.cluster(
        workers=3, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        trainer = Trainer()
        samplers = rpc.actors(SAMPLERS, Sampler, trainer.reference())
        trainer.train()
        assert samplers.rpc_sync(Sampler.update, LIMIT_S) == [1, 1]
        stop(group.pids["worker1"])
        try:
            trainer.train(50)
            assert samplers[1].rpc_sync().update_to(51)[-1] == 51
        finally:
            os.kill(group.pids["worker1"], signal.SIGCONT)
        assert samplers[0].rpc_sync().update_to(51)[-1] == 51
        assert torch.equal(trainer.model.steps, torch.full((5,), 51))


def test_a_sampler_that_was_stopped_for_long_is_told_again(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    ask = publisher.rpc_async

    def counted(*args: Any, **given: Any) -> Any:
        told.append(args)
        return ask(*args, **given)

    with torchweft.cluster(
        workers=3, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        trainer = Trainer()
        sampler = rpc.remote("worker1", Sampler, (trainer.reference(),))
        assert sampler.rpc_sync().check() == 0
        monkeypatch.setattr(publisher, "_ANNOUNCE_S", 0.05)
        monkeypatch.setattr(publisher, "rpc_async", counted)
        stop(group.pids["worker1"])
        try:
            trainer.train()
            wait_until(lambda: len(told) > 2, lambda: "told once, and not begun in time")
        finally:
            os.kill(group.pids["worker1"], signal.SIGCONT)
        assert sampler.rpc_sync().update(LIMIT_S) == 1


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
