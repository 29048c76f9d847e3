"""Pipelines that become shorter: layers freeze, workers are lost."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import torchweft
from tests.contract.processes.pipeline_models import Residual
from torchweft import rpc
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.launch import Nursery
from torchweft.pipeline import Schedule1F1B, ScheduleGPipe
from torchweft.pipeline.elastic import ElasticPipe, FreezeByNorm, FreezeFraction, Samples

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1", "worker2", "worker3"]
TINY = 1e-12
WIDTH = 8
N_SAMPLES = 96
BATCH = 24
cross_entropy = nn.functional.cross_entropy


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


class Seen(nn.Module):
    """The first layer; counts, on its worker, how often it gets each sample."""

    counts: ClassVar[Counter[int]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, WIDTH)

    def forward(self, pixels: Tensor) -> Tensor:
        Seen.counts.update(int(each) for each in pixels[:, 0])
        return torch.tanh(self.inner(pixels[:, 1:]))


def take_counts() -> Counter[int]:
    found = Seen.counts.copy()
    Seen.counts.clear()
    return found


def all_counts() -> Counter[int]:
    return sum(rpc.rpc_all(WORKERS, take_counts), Counter())


def digits() -> tuple[Tensor, Tensor]:
    """Returns rows of a sample's number and its pixels, and the digits."""
    found = load_digits()
    pixels = torch.tensor(found.images[:N_SAMPLES]).flatten(1) / 16
    numbers = torch.arange(N_SAMPLES, dtype=torch.float64)[:, None]
    return torch.cat([numbers, pixels], 1), torch.tensor(found.target[:N_SAMPLES])


def blocks() -> nn.Sequential:
    """Returns twelve blocks; the first and last differ a little from the others."""
    torch.manual_seed(0)
    last = nn.Sequential(Residual(WIDTH), nn.Linear(WIDTH, 10))
    return nn.Sequential(Seen(), *[Residual(WIDTH) for _ in range(10)], last).double()


def make_elastic(schedule: Any = Schedule1F1B, **options: Any) -> ElasticPipe:
    made = functools.partial(schedule, 4)
    freeze = FreezeFraction(1 / 3)
    return ElasticPipe(
        blocks(), WORKERS, made, cross_entropy, freeze=freeze, costs=[1.0] * 12, **options
    )


def assert_gradients(pipe: ElasticPipe, alone: nn.Sequential, worst: float = TINY) -> None:
    found = pipe.pipe.gradients()
    for name, weight in alone.named_parameters():
        if weight.grad is None:
            assert found[name] is None, name
        else:
            assert float((found[name] - weight.grad).abs().max()) < worst, name


@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleGPipe])
def test_a_pipeline_shrinks_from_four_stages_to_one(schedule: Any) -> None:
    inputs, target = digits()
    alone = blocks()
    own = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    lengths, frozen = [], []
    all_counts()
    with make_elastic(schedule) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
        samples = Samples(N_SAMPLES, BATCH)
        while samples.epoch < 6:
            lengths.append(len(pipe.shape.replicas))
            frozen.append(pipe.shape.n_frozen)
            seen = torch.zeros(N_SAMPLES, dtype=torch.int64)
            for chosen in samples:
                seen[chosen] += 1
                own.zero_grad(set_to_none=True)
                optimizer.zero_grad()
                expected = cross_entropy(alone(inputs[chosen]), target[chosen])
                expected.backward()
                loss = pipe.step(inputs[chosen], target[chosen], samples=chosen)
                assert loss.item() == pytest.approx(expected.item(), abs=TINY)
                assert_gradients(pipe, alone)
                own.step()
                optimizer.step()
            assert bool((seen == 1).all())
            counts = all_counts()
            # Every epoch, until the first layer is frozen; then once, and never again.
            assert set(counts) == (set(range(N_SAMPLES)) if samples.epoch <= 2 else set())
            assert all(count == 1 for count in counts.values())
            changes = pipe.end_epoch()
            assert changes == (samples.epoch <= 5)
            alone[: pipe.shape.n_frozen].requires_grad_(False)
        run = sum(pipe.usage().n_layers_run.values())
        assert run == N_SAMPLES * frozen[-1]  # Each frozen layer, once for each sample.
        for name, value in pipe.pipe.state_dict().items():
            assert torch.allclose(value, alone.state_dict()[name], atol=1e-9, rtol=0)
        assert torch.allclose(pipe(inputs), alone(inputs), atol=1e-9, rtol=0)
    assert frozen == [0, 4, 6, 8, 9, 10]
    assert lengths == [4, 4, 2, 2, 1, 1]


def test_results_that_have_no_room_are_computed_again() -> None:
    inputs, target = digits()
    alone = blocks()
    alone[:6].requires_grad_(False)
    with make_elastic(max_kept_bytes=20 * WIDTH * 8) as pipe:
        pipe.freeze(6)
        for _ in range(3):
            pipe.optimizer(torch.optim.SGD, lr=0.0).zero_grad()
            pipe.step(inputs, target, samples=torch.arange(N_SAMPLES))
        usage = pipe.usage()
        assert all(each <= 20 * WIDTH * 8 for each in usage.n_bytes.values())
        kept = sum(usage.n_bytes.values()) // (WIDTH * 8)
        assert kept == 40  # Two workers have the first stage.
        assert sum(usage.n_layers_run.values()) == 6 * (3 * N_SAMPLES - 2 * kept)
        cross_entropy(alone(inputs), target).backward()
        assert_gradients(pipe, alone)
        pipe.step(inputs, target)  # Without numbers of samples, nothing is kept.
        assert sum(pipe.usage().n_layers_run.values()) == 6 * (3 * N_SAMPLES - 2 * kept)


def test_the_smallest_gradient_bounds_what_freezes() -> None:
    torch.manual_seed(1)
    parts = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    model = nn.Sequential(*parts).double()
    with torch.no_grad():
        model[2].weight.mul_(10)  # type: ignore[operator,union-attr]  # A small gradient there.
    alone = copy.deepcopy(model)
    inputs = torch.randn(8, 6, dtype=torch.float64)
    target = torch.randint(0, 6, (8,))
    cross_entropy(alone(inputs), target).backward()
    norms = [
        sum(float(weight.grad.square().sum()) for weight in alone[at].parameters()) ** 0.5
        for at in (0, 2, 4)
    ]
    assert min(norms) == norms[1]
    made, rule = functools.partial(ScheduleGPipe, 4), FreezeByNorm(0.6)
    with ElasticPipe(model, WORKERS[:2], made, cross_entropy, freeze=rule) as pipe:
        pipe.step(inputs, target)
        pipe.end_epoch()
        assert pipe.shape.n_frozen == 2  # Three without the rule's bound.


def test_wrong_numbers_and_models() -> None:
    inputs, target = digits()
    with make_elastic() as pipe:
        for samples in (torch.arange(5), torch.arange(N_SAMPLES).float(), -torch.arange(N_SAMPLES)):
            with pytest.raises(ConfigurationError, match="a batch of 96 rows"):
                pipe.step(inputs, target, samples=samples)
        with pytest.raises(ArgumentTypeError, match="samples is a list; pass a tensor"):
            pipe.step(inputs, target, samples=[*range(N_SAMPLES)])  # type: ignore[arg-type]
        pipe.freeze(3)
        assert not pipe.freeze(3)
        for number in (2, 12):
            with pytest.raises(ConfigurationError, match="pass a number from 3 to 11"):
                pipe.freeze(number)
    tied = blocks()
    tied[5] = tied[1]
    made = functools.partial(ScheduleGPipe, 4)
    with ElasticPipe(tied, WORKERS, made, cross_entropy) as pipe:
        with pytest.raises(ConfigurationError, match="'1' and '5' share a weight"):
            pipe.freeze(4)
        pipe.step(inputs, target)
    with pytest.raises(ArgumentTypeError, match="pass a Sequential"):
        ElasticPipe(nn.Linear(1, 1), WORKERS, made, cross_entropy)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="two or more"):
        ElasticPipe(tied[:1], WORKERS, made, cross_entropy)
    with pytest.raises(ConfigurationError, match="costs for 3 layers, and the model has 12"):
        ElasticPipe(tied, WORKERS, made, cross_entropy, costs=[1, 2, 3])
