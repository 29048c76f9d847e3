"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

import torchweft
from tests.contract.processes.pipeline_models import (
    WIDTH,
    Descent,
    layers,
)
from tests.contract.processes.pipeline_replay import Rule, replay, replay_without_versions
from tests.contract.processes.test_pipeline import TINY, WORKERS, distance, mse, regression
from tests.contract.processes.test_pipeline_async import (
    RATE,
    RULES,
    SGD,
    chained,
    cross_entropy,
    digits,
    perceptron,
)
from tests.contract.processes.test_pipeline_async import distance as distance_of_versions
from tests.contract.processes.test_pipeline_async import regression as minibatches
from tests.contract.processes.test_pipeline_moving import batch
from torchweft import rpc
from torchweft.errors import (
    ArgumentTypeError,
    ConfigurationError,
    PipelineError,
    SerializationError,
    StateMismatch,
)
from torchweft.launch import Nursery
from torchweft.pipeline import (
    Pipe,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    SchedulePipeDream,
    ScheduleZBVZeroBubble,
    SplitPoint,
    Table,
    cut_model,
    cut_sequential,
)
from torchweft.pipeline.host import Host
from torchweft.pipeline.schedules import Kind
from torchweft.rpc.proxies import Proxy

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


def states(pipe: Pipe) -> list[dict[str, Tensor]]:
    """Returns the weights of each worker."""
    return pipe._deployment.call_all(Host.values)


@pytest.mark.parametrize(
    "schedule", [ScheduleGPipe(8, replicas=(3, 1)), Schedule1F1B(8, replicas=(2, 2))]
)
def test_replicas_stay_equal_and_get_only_their_own_microbatches(
    schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    started = Proxy._call

    def note(self: Proxy, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if name == Host.start.__name__:
            sent.append(args[-2:])
        return started(self, name, *args, **kwargs)

    monkeypatch.setattr(Proxy, "_call", note)
    model = layers(4)
    alone = copy.deepcopy(model)
    own = torch.optim.Adam(alone.parameters(), lr=0.05)
    with Pipe(model, WORKERS, schedule, mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.05)
        for seed in range(3):
            inputs, target = regression(seed=seed)
            own.zero_grad()
            mse(alone(inputs), target).backward()
            own.step()
            optimizer.zero_grad()
            pipe.step(inputs, target)
            optimizer.step()
        found = states(pipe)
        for row, state in enumerate(found):
            first = pipe.table.replicas(*pipe.table.stages_of(row))[0]
            assert all(torch.equal(value, found[first][name]) for name, value in state.items())
        for name, value in pipe.state_dict().items():
            assert torch.allclose(value, alone.state_dict()[name], atol=1e-9, rtol=0)
        for row, (given, targets) in enumerate(sent[: len(WORKERS)]):
            forwards = {each for each in pipe.table.rows[row] if each.kind is Kind.FORWARD}
            assert {(stage, each) for stage, parts in given.items() for each in parts} == {
                (each.stage, each.microbatch) for each in forwards if each.stage == 0
            }
            assert set(targets) == {each.microbatch for each in forwards if each.stage == 1}


def csv_of_torch(kind: Any, ranks: int, n_microbatches: int, path: Path) -> str:
    """Returns the table of a schedule of torch with two stages on each rank, as torch writes it."""
    facts = {"num_stages": 2 * ranks, "group_size": ranks, "group_rank": 0, "is_last": False}
    stages = [SimpleNamespace(**facts, submod=nn.Identity()) for _ in range(2)]
    kind(stages, n_microbatches)._dump_csv(path, "compute_only")
    return path.read_text()


@pytest.mark.parametrize(
    ("name", "ranks", "n_microbatches", "ours"),
    [
        ("ScheduleDualPipeV", 4, 10, ScheduleDualPipeV(10)),
        ("ScheduleInterleavedZeroBubble", 2, 6, ScheduleInterleavedZeroBubble(6)),
        ("", 2, 2, None),
    ],
)
def test_a_table_from_elsewhere(
    name: str, ranks: int, n_microbatches: int, ours: Any, tmp_path: Path
) -> None:
    text = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1B0,1F1,1B1\n"
    if name:
        kind = getattr(torch_schedules, name, None)
        if kind is None:
            pytest.skip(f"this version of torch has no {name}")
        text = csv_of_torch(kind, ranks, n_microbatches, tmp_path / "table.csv")
    table = Table.from_csv(text)
    if ours is not None:
        assert table.rows == ours.table(ranks).rows

    class Given:
        def table(self, n_workers: int) -> Table:
            assert n_workers == ranks
            return table

    model = layers(8)
    alone = copy.deepcopy(model)
    inputs, target = regression(n_microbatches * 4)
    mse(alone(inputs), target).backward()
    with Pipe(model, WORKERS[:ranks], Given(), mse) as pipe:
        pipe.step(inputs, target)
        assert distance(pipe.gradients(), alone) < TINY


def test_a_closed_pipeline_says_so() -> None:
    pipe = Pipe(layers(4), WORKERS[:2], ScheduleGPipe(4), mse)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    inputs, target = regression(24)
    pipe.step(inputs, target)
    host, *_ = pipe._deployment.hosts
    pipe.close()
    for use in (lambda: pipe.step(inputs, target), lambda: pipe(inputs), optimizer.step):
        with pytest.raises(ConfigurationError, match="it was closed"):
            use()
    with pytest.raises(ArgumentTypeError, match="it was closed"):  # A call that comes too late.
        host.rpc_sync().start(9, True, None, {}, {})


class Alone:
    """The same training in this process."""

    def __init__(self, model: nn.Module, make: Any, **options: Any) -> None:
        self.model = copy.deepcopy(model)
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = make(trained, **options)

    def step(self, inputs: Tensor, target: Tensor) -> None:
        self.optimizer.zero_grad()
        mse(self.model(inputs), target).backward()
        self.optimizer.step()


def train(pipe: Pipe, optimizer: Any, *seeds: int) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        pipe.step(*batch(seed))
        optimizer.step()


def assert_same(pipe: Pipe, model: nn.Module) -> None:
    """Compares the weights on each worker with those of a model in this process."""
    expected = model.state_dict()
    for found in pipe._deployment.call_all(Host.values):
        for name, value in found.items():
            assert torch.allclose(value, expected[name], atol=TINY, rtol=0), name
    assert pipe.state_dict().keys() == expected.keys()


OPTIMIZERS = [(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.01})]


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
def test_training_goes_on_as_before_on_other_stages_and_workers(make: Any, options: Any) -> None:
    model = layers(8)
    alone = Alone(model, make, **options)
    moves: list[tuple[Any, list[str], Any]] = [
        (model, ["worker1", "worker3"], None),  # fewer workers
        (cut_sequential(model, [1]), WORKERS, ScheduleGPipe(6, replicas=(1, 3))),  # replicas
        (cut_sequential(model, [5]), WORKERS, ScheduleGPipe(6, replicas=(2, 2))),
        (model, ["driver", "worker2"], ScheduleZBVZeroBubble(6)),  # two stages on each
        ([model], ["worker0"], ScheduleGPipe(2)),
    ]
    with Pipe(model, WORKERS, Schedule1F1B(6), mse) as pipe:
        optimizer = pipe.optimizer(make, **options)
        train(pipe, optimizer, 0, 1)
        alone.step(*batch(0))
        alone.step(*batch(1))
        for number, (stages, names, schedule) in enumerate(moves[:-1], 2):
            pipe.repartition(stages, workers=names, schedule=schedule)
            assert pipe.workers == tuple(names)
            assert_same(pipe, alone.model)
            train(pipe, optimizer, number)
            alone.step(*batch(number))
        assert_same(pipe, alone.model)


class Twice(nn.Module):
    """Uses a weight of its own after its first and its third layer."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = layers(4)
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        first, second, third, fourth = self.parts
        found: Tensor = fourth(third(second(first(inputs) @ self.shared)) @ self.shared)
        return found


def test_a_weight_of_two_stages_of_one_worker_is_stepped_and_moved_in_both() -> None:
    model = Twice()
    alone = Alone(model, torch.optim.Adam, lr=0.01)
    begins = {f"parts.{number}": SplitPoint.BEGINNING for number in range(1, 4)}
    shared, apart = cut_model(model, begins), cut_model(model, {"parts.2": SplitPoint.BEGINNING})
    with Pipe(shared, WORKERS[:2], ScheduleInterleaved1F1B(4), mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
        for seed, (stages, schedule) in enumerate(
            [
                (shared, ScheduleInterleaved1F1B(4)),
                (apart, Schedule1F1B(4)),
                (shared, ScheduleInterleaved1F1B(4)),
            ]
        ):
            pipe.repartition(stages, schedule=schedule)
            train(pipe, optimizer, 2 * seed, 2 * seed + 1)
            alone.step(*batch(2 * seed))
            alone.step(*batch(2 * seed + 1))
            assert_same(pipe, alone.model)


def test_a_state_of_the_optimizer_is_loaded_by_name() -> None:
    model = layers(4)
    alone = Alone(model, torch.optim.Adam, lr=0.01)
    with Pipe(model, WORKERS[:3], Schedule1F1B(4), mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
        train(pipe, optimizer, 0)
        saved, state = pipe.state_dict(), optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.01
    assert state["param_groups"][0]["params"] == list(dict(model.named_parameters()))
    with Pipe(layers(4, seed=5), WORKERS[2:], Schedule1F1B(4), mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.5)
        pipe.load_state_dict(saved)
        optimizer.load_state_dict(state)
        train(pipe, optimizer, 1)
        alone.step(*batch(0))
        alone.step(*batch(1))
        assert_same(pipe, alone.model)
        with pytest.raises(ConfigurationError, match="no state_dict of a PipeOptimizer"):
            optimizer.load_state_dict(alone.optimizer.state_dict())
        with pytest.raises(SerializationError, match="keep its state_dict"):
            copy.deepcopy(optimizer)
        with pytest.raises(ConfigurationError, match="takes no closure"):
            optimizer.step(lambda: 0)


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
def test_a_snapshot_is_restored_on_other_stages_and_workers(
    make: Any, options: Any, tmp_path: Path
) -> None:
    model = layers(6)
    alone = Alone(model, make, **options)
    program: dict[str, Any] = {"losses": [0.5], "epoch": 3}
    with Pipe(model, WORKERS, Schedule1F1B(6), mse) as pipe:
        optimizer = pipe.optimizer(make, **options)
        train(pipe, optimizer, 0, 1)
        optimizer.param_groups[0]["lr"] = alone.optimizer.param_groups[0]["lr"] = 0.003
        assert pipe.save(tmp_path, step=2, state=program).step == 2
        train(pipe, optimizer, 2)
    for seed in range(3):
        if seed == 2:
            alone.optimizer.param_groups[0]["lr"] = 0.003
        else:
            alone.optimizer.param_groups[0]["lr"] = options["lr"]
        alone.step(*batch(seed))
    program = {"losses": [], "epoch": 0}
    schedule = ScheduleGPipe(6, replicas=(2, 1))
    with Pipe(cut_sequential(layers(6, seed=9), [2]), WORKERS[1:], schedule, mse) as pipe:
        optimizer = pipe.optimizer(make, lr=0.7)
        assert pipe.restore(tmp_path, state=program).step == 2
        assert program == {"losses": [0.5], "epoch": 3}
        train(pipe, optimizer, 2)
        assert_same(pipe, alone.model)
        assert optimizer.param_groups[0]["lr"] == 0.003
    with (
        Pipe(layers(5), WORKERS[:2], schedule=Schedule1F1B(2), loss=mse) as pipe,
        pytest.raises(StateMismatch, match=r"pipe/optimizer/0\.bias, .* and 31 more"),
    ):
        pipe.restore(tmp_path)


# The tests share workers, which connect to one another on first use.


@pytest.mark.parametrize("weights", RULES)
def test_weights_are_those_of_a_loop_that_keeps_all_versions(weights: str) -> None:
    used, period, held = RULES[weights]
    stages = perceptron(4)
    batches = digits()
    expected, losses = replay(stages, chained(cross_entropy), batches, used, [period] * 4, RATE)
    with Pipe(
        stages, WORKERS, SchedulePipeDream(weights=weights), cross_entropy, optimizer=SGD
    ) as pipe:
        found = [loss.item() for loss in pipe.run(iter(batches))]
        state = pipe.state_dict()
        assert pipe.versions_held() == held
        assert pipe.peak_held() == [4, 3, 2, 1]
    assert found == pytest.approx(losses, abs=TINY)
    assert distance_of_versions(state, expected) < TINY
    without = replay_without_versions(stages, batches, used, period, RATE)
    assert distance_of_versions(state, without) > 1e-3


# The replicas, the rule for versions, the rule, the minibatches of an update at each stage.
REPLICATED: list[tuple[tuple[int, ...], str, Rule, list[int]]] = [
    ((3, 1), "stashing", lambda stage, b: b if stage else max(0, b // 3 - 1), [3, 1]),
    ((3, 1), "2bw", lambda stage, b: max(0, b // 6 - 1), [6, 6]),
    (
        (2, 1, 1),
        "stashing",
        lambda stage, b: [max(0, b // 2 - 1), max(0, b - 1), b][stage],
        [2, 1, 1],
    ),
    ((1, 3), "stashing", lambda stage, b: b // 3 if stage else max(0, b - 3), [1, 3]),
]


@pytest.mark.parametrize(("replicas", "weights", "used", "periods"), REPLICATED)
def test_replicas_take_turns_and_stay_equal(
    replicas: tuple[int, ...], weights: str, used: Rule, periods: list[int]
) -> None:
    stages = perceptron(len(replicas))
    batches = digits()[:40]  # The last update has fewer minibatches.
    expected, losses = replay(stages, chained(cross_entropy), batches, used, periods, RATE)
    schedule = SchedulePipeDream(weights=weights, replicas=replicas)
    with Pipe(stages, WORKERS, schedule, cross_entropy, optimizer=SGD) as pipe:
        assert [loss.item() for loss in pipe.run(batches)] == pytest.approx(losses, abs=TINY)
        found = states(pipe)
        assert distance_of_versions(pipe.state_dict(), expected) < TINY
        for row, state in enumerate(found):
            first = found[pipe.table.replicas(*pipe.table.stages_of(row))[0]]
            assert all(torch.equal(value, first[name]) for name, value in state.items())


def test_the_end_of_a_run_may_overtake_its_start() -> None:
    with Pipe(layers(4), WORKERS, SchedulePipeDream(), mse, optimizer=Descent) as pipe:
        # Calls to a worker run side by side, so a source that raises at once may bring this about.
        deployment = pipe._deployment
        rpc.on(deployment.hosts[2]).rpc_sync(Host.abort, deployment.steps.number + 1)
        with pytest.raises(PipelineError, match="the step was ended by its driver"):
            list(pipe.run(minibatches(6)))
        assert len(list(pipe.run(minibatches(6)))) == 6
