"""Pipelines on real workers, compared with one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes.pipeline_models import (
    TIES,
    TRANSFORMER,
    WIDTH,
    Failing,
    Slow,
    layers,
    makers,
    run_transformer,
    token_loss,
    transformer,
)
from torchweft import rpc
from torchweft.errors import ArgumentTypeError, ConfigurationError, PipelineError
from torchweft.launch import Nursery
from torchweft.pipeline import (
    Pipe,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleNaive,
    ScheduleZBH1,
    ScheduleZBVZeroBubble,
    cut_sequential,
)

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1", "worker2", "worker3"]
TINY = 1e-12
mse = nn.functional.mse_loss


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


def regression(rows: int = 24, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)


def tokens(rows: int, length: int, seed: int = 2) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(11, (rows, length), generator=generator)
    positions = torch.arange(length).repeat(rows, 1)
    return {"tokens": found, "positions": positions}, found.roll(1, 1)


def distance(found: dict[str, Any], model: nn.Module) -> float:
    """Returns the largest difference between gradients and those of a model in this process."""
    names = dict(model.named_parameters(remove_duplicate=False))
    assert found.keys() == names.keys()
    return max(float((found[name] - weight.grad).abs().max()) for name, weight in names.items())


SCHEDULES: list[tuple[Any, int]] = [
    (ScheduleNaive(6), 4),
    (ScheduleGPipe(6), 4),
    (Schedule1F1B(6), 4),
    (Schedule1F1B(2), 4),
    (ScheduleInterleaved1F1B(4), 4),
    (ScheduleLoopedBFS(6, stages_per_worker=3), 2),
    (ScheduleInterleavedZeroBubble(4), 4),
    (ScheduleZBH1(6), 4),
    (ScheduleZBVZeroBubble(8), 4),
    (ScheduleDualPipeV(8), 4),
    (ScheduleGPipe(8, replicas=(3, 1)), 4),
    (Schedule1F1B(8, replicas=(1, 2)), 3),
    (Schedule1F1B(6, replicas=(2, 1, 1)), 4),
]


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize(
    ("schedule", "count"), SCHEDULES, ids=[type(each[0]).__name__ for each in SCHEDULES]
)
def test_gradients_of_a_chain_are_those_of_one_process(
    schedule: Any, count: int, checkpoint: Any
) -> None:
    model = layers(9)
    alone = copy.deepcopy(model)
    inputs, target = regression()
    expected = mse(alone(inputs), target)
    expected.backward()
    with Pipe(model, WORKERS[:count], schedule, mse, checkpoint=checkpoint) as pipe:
        loss = pipe.step(inputs, target)
        assert loss.item() == pytest.approx(expected.item(), abs=TINY)
        assert distance(pipe.gradients(), alone) < TINY
        assert torch.allclose(pipe(inputs), alone(inputs), atol=TINY, rtol=0)


def test_a_replica_that_takes_too_long_is_named() -> None:
    stage = nn.Sequential(Slow(1.5), nn.Linear(4, WIDTH).double())
    text = (
        "stage 0 on worker 'worker0' waited 0.5 s for the gradients of a weight that it shares "
        "from stage 0 on 'worker1'"
    )
    inputs, target = regression()
    with Pipe([stage], WORKERS[:2], ScheduleGPipe(2, replicas=(2,)), mse, timeout=0.5) as pipe:
        half = torch.cat([-inputs[:12].abs(), inputs[12:]])
        with pytest.raises(PipelineError, match=text):
            pipe.step(half, target)
        pipe.step(-inputs.abs(), target)


@pytest.mark.parametrize("schedule", [ScheduleGPipe(4), Schedule1F1B(4), ScheduleZBH1(4)])
@pytest.mark.parametrize("is_made_there", [False, True])
def test_skips_ties_and_arguments_of_the_batch(schedule: Any, is_made_there: bool) -> None:
    alone = nn.ModuleList(transformer(3))
    stages: Any = makers(3) if is_made_there else transformer(3)
    ties = TIES if is_made_there else ()
    with Pipe(stages, WORKERS, schedule, token_loss, wiring=TRANSFORMER, ties=ties) as pipe:
        for length in (5, 3):  # The shapes change between batches.
            batch, target = tokens(8, length)
            alone.zero_grad()
            expected = token_loss(run_transformer(alone, batch), target)
            expected.backward()
            optimizer = pipe.optimizer(torch.optim.SGD, lr=0.0)
            optimizer.zero_grad()
            assert pipe.step(batch, target).item() == pytest.approx(expected.item(), abs=TINY)
            assert distance(pipe.gradients(), alone) < TINY


class AddOne(nn.Module):
    """Changes its input in place; not alike if it does so twice."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


@pytest.mark.parametrize("schedule", [Schedule1F1B(4), ScheduleZBH1(4)])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_stage_may_begin_with_an_operation_in_place(schedule: Any, checkpoint: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), AddOne(), nn.ReLU(inplace=True), nn.Linear(8, 2))
    inputs, target = torch.randn(8, 8), torch.randn(8, 2)
    with Pipe(
        cut_sequential(model, [1]), WORKERS[:2], schedule, mse, checkpoint=checkpoint
    ) as pipe:
        for _ in range(2):
            loss = pipe.step(inputs, target)
        gradients = pipe.gradients()
    for _ in range(2):
        expected = mse(model(inputs), target)
        expected.backward()
    assert loss.item() == pytest.approx(expected.item())
    for name, weight in model.named_parameters():
        found = gradients[name]
        assert found is not None
        assert torch.allclose(found, weight.grad, atol=1e-5)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_training_with_tied_weights_and_clipping_is_that_of_one_process(make: Any) -> None:
    alone = nn.ModuleList(transformer(4))
    own = make(alone.parameters(), lr=0.05)
    with Pipe(
        makers(4), WORKERS, Schedule1F1B(4), token_loss, wiring=TRANSFORMER, ties=TIES
    ) as pipe:
        optimizer = pipe.optimizer(make, lr=0.05)
        for number in range(4):
            batch, target = tokens(8, 4, seed=number)
            own.zero_grad()
            token_loss(run_transformer(alone, batch), target).backward()
            norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.3)
            own.step()
            optimizer.zero_grad()
            pipe.step(batch, target)
            assert pipe.clip_grad_norm_(0.3).item() == pytest.approx(norm.item(), abs=TINY)
            optimizer.step()
        state = pipe.state_dict()
    for name, value in alone.state_dict().items():
        assert torch.allclose(state[name], value, atol=1e-9, rtol=0)
    assert torch.equal(state["0.weight"], state["3.weight"])


def test_statistics_of_a_batch_normalization_follow_each_microbatch() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
    alone = copy.deepcopy(model)
    inputs, target = regression(12)
    for part, wanted in zip(inputs.chunk(3), target.chunk(3), strict=True):
        (mse(alone(part), wanted) / 3).backward()
    for checkpoint in ("never", "always"):
        with Pipe(
            cut_sequential(model, [1]), WORKERS[:2], ScheduleGPipe(3), mse, checkpoint=checkpoint
        ) as pipe:
            pipe.step(inputs, target)
            assert distance(pipe.gradients(), alone) < TINY
            for name, value in pipe.state_dict().items():
                assert torch.equal(value, alone.state_dict()[name]), name
            pipe.eval()
            assert torch.allclose(pipe(inputs), copy.deepcopy(alone).eval()(inputs), atol=TINY)


def test_nothing_is_sent_back_into_a_frozen_prefix() -> None:
    model = layers(4)
    model[0].requires_grad_(False)
    alone = copy.deepcopy(model)
    inputs, target = regression()
    mse(alone(inputs), target).backward()
    with Pipe(model, WORKERS, Schedule1F1B(4), mse) as pipe:
        pipe.step(inputs, target)
        found = pipe.gradients()
    assert found["0.weight"] is None
    assert found["0.bias"] is None
    for name, weight in list(alone.named_parameters())[2:]:
        assert torch.allclose(found[name], weight.grad, atol=TINY, rtol=0)


@pytest.mark.parametrize(
    ("schedule", "held"), [(ScheduleGPipe(16), [16] * 4), (Schedule1F1B(16), [4, 3, 2, 1])]
)
def test_activations_held(schedule: Any, held: list[int]) -> None:
    with Pipe(layers(4), WORKERS, schedule, mse) as pipe:
        pipe.step(*regression(32))
        assert pipe.peak_held() == held


def test_a_stage_that_fails_is_named_and_the_next_step_works() -> None:
    model = [layers(1), Failing(), nn.Linear(WIDTH, WIDTH).double()]
    with Pipe(model, WORKERS[:3], Schedule1F1B(4), mse) as pipe:
        inputs, target = regression()
        before = pipe.step(inputs, target)
        bad = inputs.clone()
        bad[-1] = -1e6 * torch.sign(pipe.state_dict()["0.0.weight"][0])
        with pytest.raises(
            PipelineError, match=r"stage 1 on worker 'worker1' .* micro-batch 3"
        ) as caught:
            pipe.step(bad, target)
        assert (caught.value.stage, caught.value.worker, caught.value.microbatch) == (
            1,
            "worker1",
            3,
        )
        assert isinstance(caught.value.__cause__, ArithmeticError)
        assert "float64[6, 6] from stage 0" in str(caught.value)
        assert torch.equal(pipe.step(inputs, target), before)


def test_stages_that_do_not_fit_are_named_with_shapes() -> None:
    stages = [nn.Linear(4, 6), nn.Linear(5, 6)]
    with Pipe(stages, WORKERS[:2], ScheduleGPipe(2), mse) as pipe:
        inputs, target = regression()
        with pytest.raises(PipelineError, match=r"stage 1 .* float32\[12, 6\] from stage 0"):
            pipe.step(inputs.float(), target.float())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"stages": [nn.Linear(4, 4)]}, "2 stages on these workers, and there are 1"),
        ({"stages": nn.Sequential(nn.Linear(4, 4))}, "1 layers cannot be cut into 2 stages"),
        ({"workers": ["worker0", "worker0"]}, "name each worker of the pipeline once"),
        ({"checkpoint": "sometimes"}, "pass one of 'never', 'except_last', 'always'"),
        ({"schedule": ScheduleZBVZeroBubble(1)}, "cannot have 1 micro-batches"),
        ({"ties": [((0, "weight"), (7, "weight"))]}, "there are the stages 0 to 1"),
        ({"schedule": ScheduleGPipe}, r"schedule is an ABCMeta; .* such as ScheduleGPipe\(8\)"),
        ({"schedule": 4}, "schedule is 4, an int; pass a schedule"),
        ({"workers": "worker0"}, "workers is 'worker0'; pass a list of names"),
        ({"loss": "mse"}, "loss is 'mse', a str; pass a function"),
    ],
)
def test_what_cannot_be_a_pipeline(arguments: dict[str, Any], text: str) -> None:
    usual: dict[str, Any] = {
        "stages": [nn.Linear(4, 4), nn.Linear(4, 4)],
        "workers": WORKERS[:2],
        "schedule": ScheduleGPipe(2),
        "loss": mse,
    }
    with pytest.raises(ConfigurationError, match=text):
        Pipe(**(usual | arguments))


def make_none() -> Any:
    return None


def make_too_late() -> nn.Module:
    raise KeyError("weights")


@pytest.mark.parametrize(
    ("source", "text"),
    [(make_none, "its function returned None; it returns a module"), (make_too_late, "KeyError")],
)
def test_a_stage_that_cannot_be_made_is_named(source: Any, text: str) -> None:
    with pytest.raises(
        PipelineError, match=f"stage 1 on worker 'worker1' .* made: {text}"
    ) as error:
        Pipe([nn.Linear(4, 4), source], WORKERS[:2], ScheduleGPipe(2), mse)
    assert (error.value.stage, error.value.worker) == (1, "worker1")


def test_options_that_cannot_work() -> None:
    with Pipe(layers(4), WORKERS[:2], ScheduleGPipe(4), mse) as pipe:
        with pytest.raises(ArgumentTypeError, match="optimizer_class is 'SGD', a str"):
            pipe.optimizer("SGD")  # type: ignore[arg-type]
        for norm in ("1", -1.0, float("nan")):
            with pytest.raises(ConfigurationError, match="max_norm is"):
                pipe.clip_grad_norm_(norm)  # type: ignore[arg-type]


class Outputs(NamedTuple):
    first: Tensor
    second: Tensor


class Forked(nn.Module):
    def forward(self, x: Tensor) -> Outputs:
        return Outputs(x, x + 1)


def test_outputs_with_names_keep_them() -> None:
    with Pipe([nn.Identity(), Forked()], WORKERS[:2], ScheduleGPipe(2)) as pipe:
        x = torch.arange(8.0).view(4, 2)
        found = pipe(x)
    assert isinstance(found, Outputs)
    assert torch.equal(found.second, x + 1)


def test_batches_that_cannot_be_cut() -> None:
    with Pipe(layers(4), WORKERS[:2], ScheduleGPipe(5), mse) as pipe:
        inputs, target = regression(24)
        with pytest.raises(ConfigurationError, match="24 rows, which cannot be cut into 5 equal"):
            pipe.step(inputs, target)
        with pytest.raises(ConfigurationError, match="the target has 24 rows"):
            pipe.step(inputs[:20], target)
    without = Pipe(layers(4), WORKERS[:2], ScheduleGPipe(4))
    with without, pytest.raises(ConfigurationError, match="no loss function"):
        without.step(inputs, target)
    with pytest.raises(ArgumentTypeError, match="pass a Sequential, or a list"):
        Pipe(nn.Linear(2, 2), WORKERS[:2], ScheduleGPipe(4))  # type: ignore[arg-type]


def test_the_driver_may_hold_a_stage_and_keeps_its_own_model() -> None:
    model = layers(4)
    before = copy.deepcopy(model.state_dict())
    inputs, target = regression()
    with Pipe(model, ["driver", "worker0"], Schedule1F1B(4), mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        pipe.step(inputs, target)
        optimizer.step()
        assert not torch.equal(pipe.state_dict()["0.weight"], before["0.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class ThreadsOf(nn.Module):
    """Returns the number of threads that operations use where it runs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.full_like(inputs, torch.get_num_threads())


def test_a_number_of_threads_set_by_a_call_is_that_of_the_stages() -> None:
    stages = [nn.Sequential(ThreadsOf(), nn.Linear(4, 4).double()), nn.Identity()]
    nn.init.eye_(stages[0][1].weight)  # type: ignore[index,arg-type]
    nn.init.zeros_(stages[0][1].bias)  # type: ignore[index,arg-type]
    before = rpc.rpc_sync("worker0", torch.get_num_threads)
    with Pipe(stages, WORKERS[:2], ScheduleGPipe(2), mse) as pipe:
        try:
            for count in (1, 2, 1):
                rpc.rpc_sync("worker0", torch.set_num_threads, args=(count,))
                found = pipe(torch.zeros(2, 4, dtype=torch.float64))
                assert torch.equal(found, torch.full((2, 4), float(count), dtype=torch.float64))
        finally:
            rpc.rpc_sync("worker0", torch.set_num_threads, args=(before,))
