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
    layers,
)
from tests.contract.processes.test_pipeline import TINY, WORKERS, distance, mse, regression
from torchweft import rpc
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.launch import Nursery
from torchweft.pipeline import (
    Pipe,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    Table,
    recording,
)
from torchweft.pipeline.host import Host
from torchweft.pipeline.schedules import Kind
from torchweft.reports import lead_of
from torchweft.rpc.api import Proxy

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


def test_a_clock_is_read_through_a_call() -> None:
    info = rpc.get_worker_info("worker0")
    for each in recording._readings(info):
        # Both clocks are one: the true difference is 0.
        found = lead_of([each])
        assert abs(found.ahead_s) <= found.error_s
