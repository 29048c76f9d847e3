"""Modules under ``DistributedDataParallel`` in contexts: trainers with gloo, a table on a server.

The expected gradients are those of one process that has the batches of all trainers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.processes import ddp_functions as functions
from torchweft import rpc
from torchweft.autograd import backward, context
from torchweft.errors import AutogradError
from torchweft.launch import Nursery, cluster

# A process group has threads and connections of its own.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")

TRAINERS = ("worker0", "worker1")
Batches = Sequence[Tensor]
Named = dict[str, Tensor]

unique = itertools.count()
USED = [torch.tensor([0, 2, 2, 5]), torch.tensor([1, 2, 3, 0])]
"""A batch for each trainer; all parameters of the model are used."""
SPARING = [torch.tensor([0, 2, 5]), torch.tensor([1, 3, 3])]
"""Batches that leave one layer unused."""


@pytest.fixture(scope="module", autouse=True)
def _workers(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("gloo") / "store"
    with cluster(workers=3, nursery=nursery):
        on_trainers(functions.join, [(rank, len(TRAINERS), str(store)) for rank in range(2)])
        yield


def on_trainers(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Calls all trainers at once, as collectives demand; returns their results."""
    calls = [
        rpc.rpc_async(trainer, function, args=own)
        for trainer, own in zip(TRAINERS, arguments, strict=True)
    ]
    # Wait for all before raising: the next function's collectives must not overtake these.
    for call in calls:
        with contextlib.suppress(Exception):
            call.wait()
    return [call.wait() for call in calls]


@pytest.fixture
def make_replicas() -> Iterator[Callable[..., str]]:
    """Makes a replica at each trainer with the test's options; returns its name there."""
    names = []

    def make(**options: Any) -> str:
        names.append(f"replica{next(unique)}")
        on_trainers(functions.make_replica, [(names[-1], options)] * 2)
        return names[-1]

    yield make
    for name in names:
        on_trainers(functions.drop_replica, [(name,)] * 2)


class Model:
    """The table and the replicated module in one process."""

    def __init__(self) -> None:
        self.net = functions.make_net()
        self.table = functions.make_table()

    def loss(self, indices: Tensor) -> Tensor:
        loss: Tensor = self.net(self.table(indices)).square().mean()
        return loss

    def gradients(self, *losses: Tensor) -> Named:
        """Returns the gradients of the module for the mean of losses."""
        self.net.zero_grad()
        torch.stack(losses).mean().backward()
        found = {name: parameter.grad for name, parameter in self.net.named_parameters()}
        return {name: grad.clone() for name, grad in found.items() if grad is not None}

    def table_gradient(self, indices: Tensor) -> Tensor:
        """Returns the gradient of the table for the batch of one trainer."""
        return torch.autograd.grad(self.loss(indices), self.table.weight)[0]


def assert_same(actual: Named, expected: Named) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


def of_each(batches: Batches, name: str) -> list[tuple[Any, ...]]:
    return [(name, batch) for batch in batches]


every_form = pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 1e-5},
    ],
    ids=lambda options: "+".join(options) or "plain",
)


@every_form
def test_gradients_equal_those_of_one_process_with_all_batches(
    make_replicas: Callable[..., str], options: dict[str, Any]
) -> None:
    name, model = make_replicas(**options), Model()
    optimizer = torch.optim.Adam(model.net.parameters(), lr=0.1)
    steps = 3
    results = on_trainers(functions.train, [(name, [batch] * steps) for batch in USED])
    for step in range(steps):
        expected = model.gradients(*[model.loss(batch) for batch in USED])
        for rank, (in_steps, _) in enumerate(results):
            gradients, of_table = in_steps[step]
            assert_same(gradients, expected)
            assert_same({"table": of_table}, {"table": model.table_gradient(USED[rank])})
        optimizer.step()
    for _, parameters in results:
        assert_same(parameters, {key: p.detach() for key, p in model.net.named_parameters()})
    assert on_trainers(functions.grads, [(name,)] * 2) == [{}, {}]


@every_form
def test_plain_backward_beside_contexts_is_as_it_was(
    make_replicas: Callable[..., str], options: dict[str, Any]
) -> None:
    name, model = make_replicas(**options), Model()
    ones = torch.ones(4, functions.WIDTH).double()
    once = model.gradients(model.net(ones).sum())
    for first, between, twice in on_trainers(
        functions.run_locally_around_a_pass, of_each(USED, name)
    ):
        assert_same(first, once)
        assert_same(between, once)
        assert_same(twice, {key: 2 * gradient for key, gradient in once.items()})


def test_unused_parameters_have_no_gradient(make_replicas: Callable[..., str]) -> None:
    name, model = make_replicas(find_unused_parameters=True), Model()
    expected = model.gradients(*[model.loss(batch) for batch in SPARING])
    for gradients, _ in on_trainers(functions.run_pass, of_each(SPARING, name)):
        assert "spare.weight" not in gradients
        assert_same(gradients, expected)


def test_parameters_that_one_trainer_does_not_use_get_the_share_of_the_other(
    make_replicas: Callable[..., str],
) -> None:
    name, model = make_replicas(find_unused_parameters=True), Model()
    batches = [USED[0], SPARING[1]]
    expected = model.gradients(*[model.loss(batch) for batch in batches])
    for gradients, _ in on_trainers(functions.run_pass, of_each(batches, name)):
        assert_same(gradients, expected)


def test_unused_parameters_are_an_error_if_ddp_does_not_look_for_them(
    make_replicas: Callable[..., str],
) -> None:
    name = make_replicas()
    with pytest.raises(AutogradError, match=r"spare\.weight.*find_unused_parameters") as caught:
        on_trainers(functions.run_pass, of_each(SPARING, name))
    assert caught.value.worker in TRAINERS


def test_no_sync_leaves_averaging_to_the_next_pass(make_replicas: Callable[..., str]) -> None:
    name, model = make_replicas(), Model()
    results = on_trainers(
        functions.accumulate_without_sync, [(name, [batch, batch.flip(0), batch]) for batch in USED]
    )
    for batch, (local, _) in zip(USED, results, strict=True):
        expected = model.gradients(model.loss(batch))
        assert_same(local, {key: 2 * gradient for key, gradient in expected.items()})
    average = model.gradients(*[model.loss(batch) for batch in USED])
    for _, total in results:
        assert_same(total, {key: 3 * gradient for key, gradient in average.items()})


def test_contexts_of_two_threads_are_averaged_one_after_the_other(
    make_replicas: Callable[..., str],
) -> None:
    name, model = make_replicas(), Model()
    of_threads = [USED, [batch.flip(0) + 0 * batch for batch in reversed(USED)]]
    results = on_trainers(
        functions.run_passes_of_two_threads,
        [(name, [batches[rank] for batches in of_threads]) for rank in range(2)],
    )
    for place, batches in enumerate(of_threads):
        expected = model.gradients(*[model.loss(batch) for batch in batches])
        for of_trainer in results:
            assert_same(of_trainer[place], expected)


def test_hooks_of_parameters_see_what_is_to_be_averaged_once(
    make_replicas: Callable[..., str],
) -> None:
    name, model = make_replicas(), Model()
    expected = model.gradients(*[model.loss(batch) for batch in USED])
    expected["first.bias"] *= 2
    for calls, gradients in on_trainers(functions.run_pass_with_hook, of_each(USED, name)):
        assert calls == 1
        assert_same(gradients, expected)


def call_replica(trainer: str, name: str, inputs: Tensor) -> Tensor:
    outputs: Tensor = rpc.rpc_sync(trainer, functions.apply_replica, args=(name, inputs))
    return outputs


def test_replicas_of_workers_are_averaged_in_one_pass(make_replicas: Callable[..., str]) -> None:
    name, model = make_replicas(), Model()
    inputs = [torch.rand(4, functions.WIDTH).double() for _ in TRAINERS]
    with context() as context_id:
        losses = [
            call_replica(trainer, name, own).square().mean()
            for trainer, own in zip(TRAINERS, inputs, strict=True)
        ]
        backward(context_id, [torch.stack(losses).sum()])
        results = on_trainers(functions.gradients, [(name, context_id)] * 2)
    expected = model.gradients(*[model.net(own).square().mean() for own in inputs])
    for gradients in results:
        assert_same(gradients, expected)


def test_a_replica_may_feed_another_one(make_replicas: Callable[..., str]) -> None:
    name, models = make_replicas(), [Model(), Model()]
    inputs = torch.rand(4, functions.WIDTH).double()
    with context() as context_id:
        hidden = call_replica(TRAINERS[0], name, inputs)
        backward(context_id, [call_replica(TRAINERS[1], name, hidden).square().sum()])
        results = on_trainers(functions.gradients, [(name, context_id)] * 2)
    loss = models[1].net(models[0].net(inputs)).square().sum()
    first, second = models[0].gradients(loss), {}
    for key, parameter in models[1].net.named_parameters():
        assert parameter.grad is not None
        second[key] = parameter.grad
    for gradients in results:
        assert_same(gradients, {key: (first[key] + second[key]) / 2 for key in first})


@every_form
def test_the_output_of_a_replica_may_be_sent_and_used_beside_the_answer(
    make_replicas: Callable[..., str], options: dict[str, Any]
) -> None:
    """Its graph waits for itself: the pass runs it in a gate."""
    name, model = make_replicas(**options), Model()
    inputs = [torch.rand(4, functions.WIDTH).double() for _ in TRAINERS]
    results = on_trainers(functions.run_residual_pass, [(name, own) for own in inputs])
    losses = [(hidden.sin() + hidden).square().mean() for hidden in map(model.net, inputs)]
    expected = model.gradients(*losses)
    for gradients in results:
        assert_same(gradients, expected)


def test_a_replica_may_be_called_again_and_a_result_not_be_used(
    make_replicas: Callable[..., str],
) -> None:
    name, model = make_replicas(), Model()
    inputs = [torch.rand(4, functions.WIDTH).double() for _ in range(3)]
    with context() as context_id:
        outputs = [[call_replica(trainer, name, given) for given in inputs] for trainer in TRAINERS]
        losses = [output.square().sum() for of_one in outputs for output in of_one[:2]]
        backward(context_id, [torch.stack(losses).sum()])
        results = on_trainers(functions.gradients, [(name, context_id)] * 2)
    halves = [model.net(given).square().sum() for given in inputs[:2]]
    expected = model.gradients(halves[0] + halves[1])
    for gradients in results:
        assert_same(gradients, expected)


def test_a_failing_collective_fails_the_pass_and_names_the_worker(
    make_replicas: Callable[..., str],
) -> None:
    name = make_replicas()
    with pytest.raises(AutogradError, match="the cable is gone") as caught:
        on_trainers(functions.run_pass_with_failing_collective, of_each(USED, name))
    assert caught.value.worker in TRAINERS
    assert "DistributedDataParallel" in caught.value.operation


def test_a_module_under_ddp_twice_is_refused(make_replicas: Callable[..., str]) -> None:
    name = make_replicas()
    with pytest.raises(AutogradError, match="wrap it once"):
        on_trainers(functions.run_pass_through_two_wrappers, of_each(USED, name))


def test_a_failed_pass_does_not_spoil_the_next_one(make_replicas: Callable[..., str]) -> None:
    name, model = make_replicas(), Model()
    with pytest.raises(AutogradError):
        on_trainers(functions.run_pass, of_each(SPARING, name))
    expected = model.gradients(*[model.loss(batch) for batch in USED])
    for gradients, _ in on_trainers(functions.run_pass, of_each(USED, name)):
        assert_same(gradients, expected)
