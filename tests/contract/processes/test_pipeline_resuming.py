"""Pipelines that go on from a snapshot after a worker was killed."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.contract.processes.pipeline_models import WIDTH, layers
from torchweft import rpc
from torchweft.errors import SnapshotNotFound, WorkerLost
from torchweft.launch import Cluster
from torchweft.pipeline import Schedule1F1B
from torchweft.pipeline.elastic import ElasticPipe, Samples

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1", "worker2"]
TINY = 1e-12
mse = nn.functional.mse_loss


class Deadly(nn.Module):
    """Ends its worker at once when an input is very large."""

    def forward(self, inputs: Tensor) -> Tensor:
        if bool((inputs.detach().abs() > 1e6).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        return inputs


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(48, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(48, WIDTH, generator=generator, dtype=torch.float64)


def model_with(place: int) -> nn.Sequential:
    """Returns six layers; one of them may end its worker."""
    found = layers(6)
    found[place] = nn.Sequential(found[place], Deadly())
    return found


@pytest.mark.parametrize(("place", "victim"), [(1, "worker0"), (3, "worker1"), (5, "worker2")])
def test_training_goes_on_from_a_snapshot_on_a_worker_fewer(
    three: Cluster, place: int, victim: str, tmp_path: Path
) -> None:
    inputs, target = data()
    model = model_with(place)
    alone = copy.deepcopy(model)
    own = torch.optim.Adam(alone.parameters(), lr=0.01)
    schedule = functools.partial(Schedule1F1B, 6)
    samples, seen, lost = Samples(48, 12, seed=1), [], []
    with ElasticPipe(model, WORKERS, schedule, mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
        while samples.epoch < 3:
            for chosen in samples:
                given = inputs[chosen]
                if len(seen) == 6 and not lost:
                    given = given * 1e30  # Deadly in the middle of this step.
                try:
                    optimizer.zero_grad()
                    pipe.step(given, target[chosen])
                    optimizer.step()
                except WorkerLost as error:
                    lost.append(error.worker)
                    snapshot = pipe.resume(tmp_path, state={"samples": samples, "seen": seen})
                    assert snapshot.step == len(seen) == 4
                    continue
                seen.append(chosen.tolist())
                if len(seen) % 4 == 0:
                    state = {"samples": samples, "seen": seen}
                    pipe.save(tmp_path, step=len(seen), state=state, keep=1)
        assert lost == [victim]
        assert pipe.workers == tuple(name for name in WORKERS if name != victim)
        assert len(pipe.shape.replicas) == 2
        # Every sample once an epoch, and the gradients of one process all along.
        for first in range(0, 12, 4):
            epoch = itertools.chain(*seen[first : first + 4])
            assert sorted(epoch) == list(range(48))
        for chosen in seen:
            own.zero_grad()
            mse(alone(inputs[chosen]), target[chosen]).backward()
            own.step()
        gradients = pipe.pipe.gradients()
        for name, weight in alone.named_parameters():
            assert torch.allclose(gradients[name], weight.grad, atol=TINY, rtol=0)
            assert torch.allclose(pipe.pipe.state_dict()[name], weight, atol=1e-10, rtol=0)


def test_a_frozen_pipeline_resumes_with_its_frozen_layers(three: Cluster, tmp_path: Path) -> None:
    inputs, target = data()
    model = model_with(4)
    chosen = torch.arange(48)
    schedule = functools.partial(Schedule1F1B, 6)
    with ElasticPipe(model, WORKERS, schedule, mse, costs=[1.0] * 6) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        pipe.freeze(2)
        pipe.step(inputs, target, samples=chosen)
        optimizer.step()
        pipe.save(tmp_path, step=1)
        pipe.freeze(4)
        saved = pipe.pipe.state_dict()
        for _ in range(2):  # The kept results are those of four frozen layers.
            optimizer.zero_grad()
            pipe.step(inputs, target, samples=chosen)
        with pytest.raises(WorkerLost):
            pipe.step(torch.cat([inputs[1:], inputs[:1] * 1e30]), target)
        pipe.resume(tmp_path)
        assert pipe.shape.n_frozen == 2
        alone = model_with(4)
        alone.load_state_dict(saved)
        alone[:2].requires_grad_(False)
        for _ in range(3):  # Each time with other weights in layers 2 and 3.
            own = torch.optim.SGD(alone[2:].parameters(), lr=0.1)
            own.zero_grad()
            mse(alone(inputs), target).backward()
            optimizer.zero_grad()
            pipe.step(inputs, target, samples=chosen)
            gradients = pipe.pipe.gradients()
            for name, weight in alone.named_parameters():
                if weight.grad is not None:
                    assert torch.allclose(gradients[name], weight.grad, atol=TINY, rtol=0)
            own.step()
            optimizer.step()


def test_there_must_be_a_snapshot_and_a_worker(three: Cluster, tmp_path: Path) -> None:
    schedule = functools.partial(Schedule1F1B, 6)
    with ElasticPipe(layers(6), WORKERS, schedule, mse) as pipe:
        pipe.optimizer(torch.optim.SGD, lr=0.1)
        with pytest.raises(SnapshotNotFound):
            pipe.resume(tmp_path)
        pipe.save(tmp_path, step=0)
        for pid in three.pids.values():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            pipe.step(*data())
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            with pytest.raises(WorkerLost) as caught:  # As soon as the last loss is known as well.
                pipe.resume(tmp_path)
            if all(each.error for each in rpc.health() if each.worker.name != "driver"):
                break
        assert caught.value.worker in WORKERS
