"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import torchweft
from tests.contract.processes.pipeline_models import (
    Descent,
    layers,
)
from tests.contract.processes.pipeline_replay import Rule, replay, replay_without_versions
from tests.contract.processes.test_pipeline_async import (
    RATE,
    RULES,
    SGD,
    TINY,
    WORKERS,
    chained,
    cross_entropy,
    digits,
    distance,
    mse,
    perceptron,
    regression,
)
from torchweft import rpc
from torchweft.errors import PipelineError
from torchweft.launch import Nursery
from torchweft.pipeline import Pipe, SchedulePipeDream
from torchweft.pipeline.host import Host

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


def states(pipe: Pipe) -> list[dict[str, Tensor]]:
    """Returns the weights of each worker."""
    return pipe._deployment.call_all(Host.values)


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
    assert distance(state, expected) < TINY
    without = replay_without_versions(stages, batches, used, period, RATE)
    assert distance(state, without) > 1e-3


# The replicas, the rule for versions, the rule, the minibatches of an update at each stage.
REPLICATED: list[tuple[tuple[int, ...], str, Rule, list[int]]] = [
    ((3, 1), "stashing", lambda stage, b: b if stage else max(0, b // 3 - 1), [3, 1]),
    ((3, 1), "vertical-sync", lambda stage, b: max(0, b // 3 - 1), [3, 3]),
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
        assert distance(pipe.state_dict(), expected) < TINY
        for row, state in enumerate(found):
            first = found[pipe.table.replicas(*pipe.table.stages_of(row))[0]]
            assert all(torch.equal(value, first[name]) for name, value in state.items())


def test_a_sum_over_minibatches_and_frozen_weights() -> None:
    stages = perceptron(4)
    stages[0].requires_grad_(False)
    schedule = SchedulePipeDream(weights="2bw")
    batches = digits()[:10]
    used, period, _ = RULES["2bw"]
    states: list[dict[str, Tensor]] = []
    for reduction, rate in (("mean", RATE), ("sum", RATE / period)):
        sgd = functools.partial(torch.optim.SGD, lr=rate)
        with Pipe(
            stages, WORKERS, schedule, cross_entropy, optimizer=sgd, reduction=reduction
        ) as pipe:
            losses = [loss.item() for loss in pipe.run(batches[:8])]
            assert losses[0] == pytest.approx(chained(cross_entropy)(stages, *batches[0]).item())
            states.append(pipe.state_dict())
    for name, value in states[0].items():
        assert torch.allclose(value, states[1][name], atol=TINY, rtol=0)
    before = stages[0].state_dict()
    assert all(torch.equal(value, states[0][f"0.{name}"]) for name, value in before.items())
    assert not torch.equal(states[0]["1.0.weight"], stages[1].state_dict()["0.weight"])
    assert used(1, 7) == 0


def test_the_end_of_a_run_may_overtake_its_start() -> None:
    with Pipe(layers(4), WORKERS, SchedulePipeDream(), mse, optimizer=Descent) as pipe:
        # Calls to a worker run side by side, so a source that raises at once may bring this about.
        deployment = pipe._deployment
        rpc.on(deployment.hosts[2]).rpc_sync(Host.abort, deployment.steps.number + 1)
        with pytest.raises(PipelineError, match="the step was ended by its driver"):
            list(pipe.run(regression(6)))
        assert len(list(pipe.run(regression(6)))) == 6
