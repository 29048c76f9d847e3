"""Weights by version on one host: samplers map the versions, come, go, and have other models."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.contract.processes.functions import wait_until
from tests.processes import shared_memory_internals
from tests.processes.weights_functions import LIMIT_S, SIZE, Model, Sampler, Trainer
from torchweft import memory, rpc
from torchweft.errors import CallTimeout, ConfigurationError, SerializationError
from torchweft.ids import WorkerInfo
from torchweft.launch import Cluster
from torchweft.weights import Publisher, Subscriber, WeightsMismatch

pytestmark = pytest.mark.keeps("threads", "descriptors")

WORKERS = ["worker0", "worker1"]


def memory_of(trainer: Trainer) -> torch.Tensor:
    kept = trainer.publisher._kept
    return kept[max(kept)].tensor


# One host


def test_a_version_in_use_is_not_overwritten_and_memory_is_bounded(group: Cluster) -> None:
    gc.collect()
    trainer = Trainer()
    samplers = rpc.actors(WORKERS, Sampler, trainer.reference())
    trainer.train()
    assert samplers.rpc_sync(Sampler.update, LIMIT_S) == [1, 1]
    before = shared_memory_internals.statistics().resident_bytes
    assert trainer.train(30) == 31
    assert samplers.rpc_sync(Sampler.check) == [1, 1], "while 30 versions were written"
    assert [taken[-1] for taken in samplers.rpc_sync(Sampler.update_to, 31)] == [31, 31]
    size_bytes = trainer.publisher._layout.size_bytes
    # The newest; two of each sampler, and one that is being written.
    grown = shared_memory_internals.statistics().resident_bytes - before
    assert grown <= 5 * 2 * size_bytes
    assert all(each.versions <= 4 for each in samplers.rpc_sync(Sampler.statistics))
    samplers.rpc_sync(Sampler.close)


def test_the_memory_of_a_version_is_ready_before_it_is_published(group: Cluster) -> None:
    trainer = Trainer()
    storage = trainer.publisher._storage
    for _ in range(3):
        wait_until(lambda: storage.prepared is not None, lambda: "no memory was prepared")
        assert storage.prepared is not None
        prepared = storage.prepared.tensor.data_ptr()
        trainer.train()
        assert memory_of(trainer).data_ptr() == prepared


def test_tensors_that_the_module_has_replaced_are_updated(group: Cluster) -> None:
    trainer = Trainer()
    sampler = Sampler(trainer.publisher)  # type: ignore[arg-type]
    trainer.train()
    assert sampler.update(LIMIT_S) == 1
    sampler.model.steps = sampler.model.steps * 2
    sampler.model.load_state_dict(Model().state_dict(), assign=True)
    trainer.train()
    assert sampler.update(LIMIT_S) == 2
    sampler.model.third = torch.nn.Linear(1, 1)
    trainer.train()
    for _ in range(2):
        with pytest.raises(WeightsMismatch, match=r"has 'third\.weight'"):
            sampler.subscriber.update(LIMIT_S)
    del sampler.model.third
    assert sampler.update() == 3
    sampler.close()


# Publishers and subscribers that come and go


def test_another_publisher_is_followed(group: Cluster) -> None:
    first, second = Trainer(after=50), Trainer()
    sampler = rpc.remote("worker0", Sampler, (first.reference(),))
    first.train()
    assert sampler.rpc_sync().update(LIMIT_S) == 51
    sampler.rpc_sync().follow(second.reference())
    assert sampler.rpc_sync().update() == 51
    second.train()
    first.train()
    assert sampler.rpc_sync().update(LIMIT_S) == 1
    wait_until(lambda: not first.publisher._subscriptions, lambda: "it is told by the former")
    sampler.rpc_sync().close()
    wait_until(lambda: not second.publisher._subscriptions, lambda: "it is told after its end")


def test_a_version_whose_fetch_failed_is_fetched_again(
    group: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    sampler = Sampler(trainer.publisher)  # type: ignore[arg-type]
    failing = [True, True]
    lends = memory.is_shared_with

    def lend_or_fail(worker: WorkerInfo) -> bool:
        if failing:
            failing.pop()
            raise MemoryError("no memory for a moment")
        return lends(worker)

    monkeypatch.setattr(memory, "is_shared_with", lend_or_fail)
    trainer.train()
    for _ in range(2):
        with pytest.raises(MemoryError, match="for a moment"):
            sampler.update(LIMIT_S)
    assert sampler.update(LIMIT_S) == 1
    sampler.close()


def test_a_dropped_subscriber_leaves(group: Cluster) -> None:
    trainer = Trainer()
    sampler = rpc.remote("worker0", Sampler, (trainer.reference(),))
    sampler.rpc_sync().check()
    assert len(trainer.publisher._subscriptions) == 1
    del sampler
    wait_until(lambda: not trainer.publisher._subscriptions, lambda: "it is told after its end")


def test_a_closed_subscriber_waits_for_nothing(group: Cluster) -> None:
    trainer = Trainer()
    sampler = Sampler(trainer.publisher)  # type: ignore[arg-type]
    sampler.close()
    assert sampler.subscriber.update() == 0
    with pytest.raises(ConfigurationError, match="is closed"):
        sampler.subscriber.update(LIMIT_S)
    with pytest.raises(ConfigurationError, match="is closed"):
        sampler.subscriber.follow(trainer.publisher)
    wait_until(lambda: not trainer.publisher._subscriptions, lambda: "it is told after its end")


# Bad input


def test_another_model_is_refused_and_named(group: Cluster) -> None:
    trainer = Trainer()
    with pytest.raises(WeightsMismatch, match=r"'first.weight' with shape \[7, 7\]") as caught:
        rpc.rpc_sync("worker0", Sampler, (trainer.reference(), 7))
    assert caught.value.tensor == "first.weight"
    with pytest.raises(WeightsMismatch, match=r"'first.weight' in torch\.bfloat16"):
        rpc.rpc_sync("worker0", Sampler, (trainer.reference(), SIZE, torch.bfloat16))
    with pytest.raises(WeightsMismatch, match="lacks 'steps'"):
        Subscriber(trainer.publisher, {"other": torch.zeros(1)})
    wait_until(lambda: not trainer.publisher._subscriptions, lambda: "it is told all the same")
    trainer.model.third = torch.nn.Linear(1, 1)
    with pytest.raises(WeightsMismatch, match=r"the source on 'driver' has 'third\.weight'"):
        trainer.publisher.publish()
    assert trainer.publisher.version == 0
    tied = Model()
    publisher = Publisher({"a": tied.first.weight, "b": tied.first.weight})
    publisher.publish()
    publisher._source["b"] = torch.ones_like(tied.first.weight)  # type: ignore[index]
    with pytest.raises(WeightsMismatch, match="'a' and 'b' apart"):
        publisher.publish()
    assert publisher.version == 1


def test_arguments_that_cannot_work(group: Cluster) -> None:
    for options in ({"deltas": -1}, {"after": 1.5}, {"dtype": torch.int64}):
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            Publisher(Model(), **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dtype is 'bfloat16', a str"):
        Publisher(Model(), dtype="bfloat16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="publisher is 3, an int"):
        Subscriber(3, Model())  # type: ignore[arg-type]


def test_waiting_for_a_version_is_bounded(group: Cluster) -> None:
    trainer = Trainer()
    sampler = Sampler(trainer.publisher)  # type: ignore[arg-type]
    with pytest.raises(
        CallTimeout, match=r"no version after 0 arrived from worker '\w+' within 0.01 s"
    ):
        sampler.subscriber.update(0.01)
    sampler.close()


def test_a_publisher_is_not_sent_itself(group: Cluster) -> None:
    trainer = Trainer()
    with pytest.raises(SerializationError, match=r"^args\[0\] .*send rpc\.RRef\(publisher\)"):
        rpc.rpc_sync("worker0", Sampler, (trainer.publisher,))
