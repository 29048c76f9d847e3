"""Asynchronous pipelines on real workers, compared with a loop in one process."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import torchweft
from tests.contract.processes.pipeline_models import (
    TRANSFORMER,
    WIDTH,
    Descent,
    Failing,
    Slow,
    layers,
    run_transformer,
    token_loss,
    transformer,
)
from tests.contract.processes.pipeline_replay import Rule, Version, replay
from torchweft.errors import ArgumentTypeError, ConfigurationError, PipelineError
from torchweft.launch import Nursery
from torchweft.pipeline import Pipe, Schedule1F1B, SchedulePipeDream, Table

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1", "worker2", "worker3"]
TINY = 1e-12
RATE = 0.02
SGD = functools.partial(torch.optim.SGD, lr=RATE)
mse = nn.functional.mse_loss
cross_entropy = nn.functional.cross_entropy
Minibatch = tuple[Tensor, Tensor]


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


@functools.cache
def digits(count: int = 88) -> list[Minibatch]:
    """Returns minibatches of 32 handwritten digits; pixels are from 0 to 8."""
    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float64) / 2
    labels = torch.tensor(found.target)
    order = torch.cat([torch.randperm(len(images), generator=seeded(s)) for s in (1, 2)])
    parts = order[: 32 * count].split(32)
    return [(images[part], labels[part]) for part in parts]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def perceptron(n_stages: int) -> list[nn.Sequential]:
    """Returns stages of one layer each, from images to ten classes.

    Its weights are large, so that it matters soon which version of them a minibatch uses.
    """
    torch.manual_seed(3)
    inner = range(n_stages - 1)
    stages = [nn.Sequential(nn.Linear(32 if s else 64, 32), nn.Tanh()) for s in inner]
    stages.append(nn.Sequential(nn.Linear(32, 10)))
    for each in stages:
        nn.init.xavier_uniform_(each[0].weight, gain=2.5)
    return [each.double() for each in stages]


def regression(count: int, rows: int = 4) -> list[Minibatch]:
    generator = seeded(5)
    return [
        (
            torch.randn(rows, 4, generator=generator, dtype=torch.float64),
            torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def chained(loss: Callable[[Any, Any], Tensor]) -> Callable[[Sequence[Any], Any, Any], Tensor]:
    def loss_of(stages: Sequence[Any], batch: Any, target: Any) -> Tensor:
        return loss(functools.reduce(lambda value, stage: stage(value), stages, batch), target)

    return loss_of


def distance(state: dict[str, Tensor], versions: Sequence[Version]) -> float:
    """Returns the largest difference between weights of a pipeline and those of its stages."""
    expected = {f"{s}.{name}": v for s, each in enumerate(versions) for name, v in each.items()}
    assert state.keys() == expected.keys()
    return max(float((state[name] - value).abs().max()) for name, value in expected.items())


# With four stages and no replicas: the rule, the minibatches of an update, the versions held.
RULES: dict[str, tuple[Rule, int, list[int]]] = {
    "stashing": (lambda stage, b: max(0, b - (3 - stage)), 1, [4, 3, 2, 1]),
    "vertical-sync": (lambda stage, b: max(0, b - 3), 1, [4, 4, 4, 4]),
    "2bw": (lambda stage, b: max(0, b // 4 - 1), 4, [2, 2, 2, 2]),
}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_skips_and_arguments_of_the_batch_with_a_driver_that_is_a_worker(checkpoint: Any) -> None:
    stages = transformer(1)
    stages[3].weight = nn.Parameter(stages[0].weight.detach().clone())  # type: ignore[union-attr]

    def minibatch(seed: int) -> tuple[dict[str, Tensor], Tensor]:
        tokens = torch.randint(11, (2, 3 + seed % 2), generator=seeded(seed))
        positions = torch.arange(tokens.shape[1]).repeat(2, 1)
        return {"tokens": tokens, "positions": positions}, tokens.roll(1, 1)

    def loss_of(runs: list[Callable[..., Any]], batch: Any, target: Any) -> Tensor:
        return token_loss(run_transformer(runs, batch), target)

    batches = [minibatch(seed) for seed in range(9)]
    used, period, _ = RULES["stashing"]
    expected, losses = replay(stages, loss_of, batches, used, [period] * 4, 0.1)
    with Pipe(
        stages,
        ["worker0", "driver", "worker1", "worker2"],
        SchedulePipeDream(weights="stashing"),
        token_loss,
        wiring=TRANSFORMER,
        checkpoint=checkpoint,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    ) as pipe:
        assert [loss.item() for loss in pipe.run(batches)] == pytest.approx(losses, abs=TINY)
        assert distance(pipe.state_dict(), expected) < TINY


def test_runs_follow_each_other_and_optimizers_keep_their_state() -> None:
    model = layers(2)
    batches = regression(12)
    adam = functools.partial(torch.optim.Adam, lr=0.05)

    def train(pipe: Pipe, *parts: Sequence[Minibatch]) -> dict[str, Tensor]:
        for part in parts:
            assert len(list(pipe.run(part))) == len(part)
        return pipe.state_dict()

    # With one worker, minibatches do not overlap: one process is enough to compare with.
    with Pipe([model], WORKERS[:1], SchedulePipeDream(), mse, optimizer=adam) as pipe:
        found = train(pipe, batches[:5], [], batches[5:])
    own = adam(model.parameters())
    for batch, target in batches:
        own.zero_grad()
        mse(model(batch), target).backward()
        own.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(found[f"0.{name}"], value, atol=TINY, rtol=0)


def test_statistics_of_a_batch_normalization_follow_each_minibatch() -> None:
    stages = [nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH)), nn.Linear(WIDTH, WIDTH)]
    stages = [each.double() for each in stages]
    with Pipe(stages, WORKERS[:2], SchedulePipeDream(), mse, optimizer=SGD) as pipe:
        assert len(list(pipe.run(regression(7)))) == 7
        state = pipe.state_dict()
        assert state["0.1.num_batches_tracked"] == 7
        batch = regression(1)[0][0]
        pipe.eval()
        for name, module in (("0", stages[0]), ("1", stages[1])):
            module.load_state_dict(
                {k.removeprefix(name + "."): v for k, v in state.items() if k[:2] == name + "."}
            )
            module.eval()
        assert torch.allclose(pipe(batch), stages[1](stages[0](batch)), atol=TINY)


# The end


def test_feeding_is_ahead_of_the_program_and_bounded() -> None:
    n_pulled = 0
    most = 0

    def source() -> Iterator[Minibatch]:
        nonlocal n_pulled
        for each in itertools.islice(itertools.cycle(regression(5)), 40):
            n_pulled += 1
            yield each

    with Pipe(layers(4), WORKERS, SchedulePipeDream(), mse, optimizer=SGD) as pipe:
        for n_taken, _ in enumerate(pipe.run(source()), 1):
            assert n_pulled == 40 or 4 <= n_pulled - n_taken <= 2 * 4 + 1
            most = max(most, n_pulled - n_taken)
        assert most == 2 * 4


def test_an_iterator_that_is_closed_ends_the_run() -> None:
    stages = perceptron(4)
    batches = digits()[:12]
    used, period, _ = RULES["stashing"]
    expected, losses = replay(stages, chained(cross_entropy), batches, used, [period] * 4, RATE)
    with Pipe(stages, WORKERS, SchedulePipeDream(), cross_entropy, optimizer=SGD) as pipe:
        before = pipe.state_dict()
        running = pipe.run(itertools.cycle(batches))
        first = [next(running).item() for _ in range(5)]
        assert first == pytest.approx(losses[:5], abs=TINY)
        for use in (pipe.state_dict, lambda: pipe(batches[0][0]), lambda: next(pipe.run(batches))):
            with pytest.raises(ConfigurationError, match="a run of this pipeline is under way"):
                use()
        running.close()  # type: ignore[attr-defined]
        assert list(running) == []
        pipe.load_state_dict(before)
        for _ in pipe.run(itertools.cycle(batches)):
            break
        pipe.load_state_dict(before)
        assert [loss.item() for loss in pipe.run(batches)] == pytest.approx(losses, abs=TINY)
        assert distance(pipe.state_dict(), expected) < TINY
        next(pipe.run(itertools.cycle(batches)))


def test_a_pipeline_that_is_closed_ends_its_run() -> None:
    pipe = Pipe(layers(4), WORKERS, SchedulePipeDream(), mse, optimizer=SGD)
    running = pipe.run(itertools.cycle(regression(3)))
    next(running)
    pipe.close()
    assert list(running) == []


def test_a_source_that_raises_ends_the_run() -> None:
    def source() -> Iterator[Minibatch]:
        yield from regression(6)
        raise LookupError("no more data")

    with Pipe(layers(4), WORKERS, SchedulePipeDream(), mse, optimizer=SGD) as pipe:
        with pytest.raises(LookupError, match="no more data"):
            list(pipe.run(source()))
        with pytest.raises(ArgumentTypeError, match="minibatch 0 is a Tensor; run takes pairs"):
            list(pipe.run(torch.zeros(3, 4)))
        with pytest.raises(ArgumentTypeError, match="batches is 3, an int; pass pairs"):
            pipe.run(3)  # type: ignore[arg-type]
        assert len(list(pipe.run(regression(6)))) == 6


@pytest.mark.parametrize("number", [0, 7])
def test_a_stage_that_fails_is_named_and_the_next_run_works(number: int) -> None:
    stages = [nn.Identity(), Failing(), nn.Linear(4, WIDTH).double()]
    with Pipe(stages, WORKERS[:3], SchedulePipeDream(), mse, optimizer=SGD) as pipe:
        good = regression(10)
        bad = list(good)
        bad[number] = (bad[number][0] - 1e6, bad[number][1])
        found: list[Tensor] = []
        text = rf"stage 1 on worker 'worker1' failed in the forward of minibatch {number}, given"
        with pytest.raises(PipelineError, match=text) as caught:
            found.extend(pipe.run(bad))
        assert (caught.value.stage, caught.value.microbatch) == (1, number)
        assert isinstance(caught.value.__cause__, ArithmeticError)
        assert len(found) <= number
        assert len(list(pipe.run(good))) == 10


class Grumpy(torch.optim.SGD):
    """Fails in every step."""

    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError("not today")


def test_an_optimizer_that_fails_is_named() -> None:
    text = "failed in the update of minibatch 0: ArithmeticError"
    with (
        Pipe(layers(2), WORKERS[:2], SchedulePipeDream(), mse, optimizer=Grumpy) as pipe,
        pytest.raises(PipelineError, match=text),
    ):
        list(pipe.run(regression(6)))


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    lbfgs = functools.partial(torch.optim.LBFGS, lr=0.1)
    with pytest.raises(ConfigurationError, match="LBFGS evaluates the model anew within a step"):
        Pipe(layers(2), WORKERS[:2], SchedulePipeDream(), mse, optimizer=lbfgs)


def test_a_stage_that_takes_too_long_is_named() -> None:
    stages = [Slow(1.5), nn.Linear(4, WIDTH).double()]
    text = r"stage 1 on worker 'worker1' waited 0.5 s for the values of minibatch 0 from stage 0"
    with (
        Pipe(stages, WORKERS[:2], SchedulePipeDream(), mse, optimizer=Descent, timeout=0.5) as pipe,
        pytest.raises(PipelineError, match=text),
    ):
        list(pipe.run(regression(3)))


def test_stages_wait_for_a_program_that_takes_longer_than_they_wait_for_each_other() -> None:
    def source() -> Iterator[Minibatch]:
        for number, each in enumerate(regression(6)):
            if number == 3:  # One replica has half an update, the other not yet begun its part.
                time.sleep(1.2)
            yield each

    schedule = SchedulePipeDream(replicas=(2, 1))
    with Pipe(layers(2), WORKERS[:3], schedule, mse, optimizer=Descent, timeout=0.5) as pipe:
        assert len(list(pipe.run(source()))) == 6


# Arguments


class Given:
    """A schedule from a table."""

    def table(self, n_workers: int) -> Table:
        return Table.from_csv("0F0,0B0,0U0\n1F0,1B0,1U0\n", name="given")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"optimizer": None}, "SchedulePipeDream steps an optimizer on each worker; pass"),
        (
            {"schedule": Schedule1F1B(2)},
            "optimizer is for asynchronous schedules, and Schedule1F1B",
        ),
        ({"schedule": Given()}, "the table 'given' has updates; only SchedulePipeDream"),
        ({"checkpoint": "except_last"}, "an asynchronous schedule has no last micro-batch"),
        (
            {"ties": [((0, "weight"), (1, "weight"))]},
            "the weight 'weight' of stage 0 is also 'weight' of stage 1",
        ),
    ],
)
def test_what_cannot_be_an_asynchronous_pipeline(arguments: dict[str, Any], text: str) -> None:
    usual: dict[str, Any] = {
        "stages": [nn.Linear(4, 4), nn.Linear(4, 4)],
        "workers": WORKERS[:2],
        "schedule": SchedulePipeDream(),
        "loss": mse,
        "optimizer": SGD,
    }
    with pytest.raises(ConfigurationError, match=text):
        Pipe(**(usual | arguments))


def test_steps_and_runs_are_not_confused() -> None:
    (batch, target), *_ = regression(1)
    with Pipe(layers(2), WORKERS[:2], SchedulePipeDream(), mse, optimizer=SGD) as pipe:
        for use in (
            lambda: pipe.step(batch, target),
            lambda: pipe.optimizer(torch.optim.SGD, lr=0.1),
            lambda: pipe.clip_grad_norm_(1.0),
        ):
            with pytest.raises(ConfigurationError, match=r"for loss in pipe\.run\(batches\)"):
                use()
    with Pipe(layers(2), WORKERS[:2], Schedule1F1B(2), mse) as pipe:
        assert pipe.versions_held() == [1, 1]
        with pytest.raises(ConfigurationError, match="1F1B is a synchronous schedule; call step"):
            pipe.run([(batch, target)])
    with (
        Pipe(layers(2), WORKERS[:2], SchedulePipeDream(), optimizer=SGD) as pipe,
        pytest.raises(ConfigurationError, match="no loss function"),
    ):
        pipe.run([(batch, target)])


class Weighed(nn.Linear):
    """Doubles the gradient of its weight, and counts how often that is complete."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("count", torch.zeros(()))
        self.weight.register_hook(lambda gradient: 2 * gradient)
        self.weight.register_post_accumulate_grad_hook(self._count)

    def _count(self, _: Tensor) -> None:
        self.count += 1


def weighed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, WIDTH).double(), Weighed())


def test_hooks_of_weights_run_for_each_minibatch() -> None:
    """With one stage, it is the training of one process."""
    alone, batches = weighed(), regression(8)
    own = torch.optim.SGD(alone.parameters(), lr=0.05)
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    with Pipe([weighed], WORKERS[:1], SchedulePipeDream(), mse, optimizer=sgd) as pipe:
        list(pipe.run(batches))
        state = pipe.state_dict()
    for inputs, target in batches:
        own.zero_grad()
        mse(alone(inputs), target).backward()
        own.step()
    for name, value in alone.state_dict().items():
        assert torch.allclose(state[f"0.{name}"], value, atol=1e-12), name
