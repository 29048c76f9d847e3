"""Gradients, optimizers and remote modules on a GPU, beside one process on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu import models
from tests.gpu.device import CPU, DEVICE
from tests.gpu.models import WholeModel, forward, inputs, make_layer
from torchweft import autograd, rpc
from torchweft.errors import ConfigurationError
from torchweft.launch import Cluster
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer, clip_grad_norm_

WORKERS = ("worker0", "worker1", "worker2")


@pytest.fixture(autouse=True)
def _forgotten(group: Cluster) -> Iterator[None]:
    yield
    for name in (group.name, *group.names):
        rpc.rpc_sync(name, models.forget)


def assert_close(actual: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert [tensor.device for tensor in actual] == [tensor.device for tensor in wanted]
    torch.testing.assert_close(list(actual), list(wanted), rtol=1e-5, atol=1e-5)


def start() -> Tensor:
    return inputs().to(DEVICE).requires_grad_()


def through(value: Tensor, *workers: str) -> Tensor:
    return rpc.rpc_sync(workers[0], forward, (value, 0, workers[1:]))


@pytest.mark.parametrize(
    "workers", [WORKERS, ("worker0", "worker1", "worker0"), ("worker0", "driver", "worker1")]
)
def test_through_a_chain_of_workers_in_a_context(group: Cluster, workers: tuple[str, ...]) -> None:
    here, whole = start(), WholeModel()
    with autograd.context() as context_id:
        result = through(here * 1, *workers)
        autograd.backward(context_id, [result.square().mean()])
        mine = autograd.get_gradients(context_id)[here]
        theirs = [
            rpc.rpc_sync(worker, models.gradients_here, (context_id, place))
            for place, worker in enumerate(workers)
        ]
    loss = whole(here).square().mean()
    assert_close([mine], torch.autograd.grad(loss, here, retain_graph=True))
    for place, found in enumerate(theirs):
        assert_close(found, whole.gradients(loss, place))


def test_through_a_chain_of_workers_outside_of_contexts(group: Cluster) -> None:
    here, whole = start(), WholeModel()
    for _ in range(2):
        autograd.backward(through(here * 1, *WORKERS).square().mean())
    loss = 2 * whole(here).square().mean()
    assert here.grad is not None
    assert_close([here.grad], torch.autograd.grad(loss, here, retain_graph=True))
    for place, worker in enumerate(WORKERS):
        found = rpc.rpc_sync(worker, models.grads_here, (place,))
        assert_close(found, whole.gradients(loss, place))
        assert rpc.rpc_sync(worker, models.devices_here, (place,)) == {str(DEVICE)}


def test_calls_at_the_same_time_and_results_that_stay_unused(group: Cluster) -> None:
    here, whole = start(), WholeModel()
    with autograd.context() as context_id:
        calls = [
            rpc.rpc_async(worker, models.two_of, (here * (number + 1), 0))
            for number, worker in enumerate(("worker0", "worker1", "worker0"))
        ]
        used = torch.stack([call.wait()["used"] for call in calls])
        autograd.backward(context_id, [used.square().mean()])
        mine = autograd.get_gradients(context_id)[here]
    layer = whole.layers[0]
    wanted = torch.stack([2 * layer(here * number) for number in (1, 2, 3)]).square().mean()
    assert_close([mine], torch.autograd.grad(wanted, here))


def test_gradients_of_gradients(group: Cluster) -> None:
    here, whole = start(), WholeModel()
    with autograd.context() as context_id:
        result = through(here * 1, *WORKERS)
        (first,) = autograd.grad(context_id, result.square().sum(), here, create_graph=True)
        penalty = (first.norm(dim=1) - 1).square().mean()
        autograd.backward(context_id, [penalty])
        mine = autograd.get_gradients(context_id)[here]
        theirs = [
            rpc.rpc_sync(worker, models.gradients_here, (context_id, place))
            for place, worker in enumerate(WORKERS)
        ]
    (wanted,) = torch.autograd.grad(whole(here).square().sum(), here, create_graph=True)
    loss = (wanted.norm(dim=1) - 1).square().mean()
    assert_close([first.detach()], [wanted.detach()])
    assert_close([mine], torch.autograd.grad(loss, here, retain_graph=True))
    for place, found in enumerate(theirs):
        parameters = whole.layers[place].parameters()
        given = torch.autograd.grad(
            loss, list(parameters), retain_graph=True, materialize_grads=True
        )
        assert_close(found, given)


def test_a_graph_over_cpu_and_gpu(group: Cluster) -> None:
    """A worker moves values between devices; each gradient is on the device of its tensor."""
    here, whole = inputs().requires_grad_(), WholeModel()
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker0", from_cpu, (here,))
        assert result.device == CPU
        autograd.backward(context_id, [result.square().mean()])
        mine = autograd.get_gradients(context_id)[here]
        theirs = rpc.rpc_sync("worker0", models.gradients_here, (context_id, 0))
    loss = whole.layers[0](here.to(DEVICE)).square().mean()
    assert_close([mine], torch.autograd.grad(loss, here, retain_graph=True))
    assert_close(theirs, whole.gradients(loss, 0))


def from_cpu(value: Tensor) -> Tensor:
    assert value.device == CPU
    return forward(value.to(DEVICE), 0).cpu()


# Remote modules and optimizers


def remote_layers(*placements: str) -> list[RemoteModule]:
    return [
        RemoteModule(placement, make_layer, args=(place,))
        for place, placement in enumerate(placements)
    ]


OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    # A large epsilon: where gradients are no more than noise, so are the steps.
    "Adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_equals_one_process(group: Cluster, kind: str) -> None:
    make, options = OPTIMIZERS[kind]
    layers = remote_layers(*[f"{worker}/{DEVICE}" for worker in WORKERS])
    references = [each for layer in layers for each in layer.remote_parameters()]
    optimizer = DistributedOptimizer(make, references, **options)
    whole = WholeModel()
    local = make(whole.parameters(), **options)
    for step in range(5):
        batch = inputs(step)
        with autograd.context() as context_id:
            value = batch.to(DEVICE)
            for layer in layers:
                value = layer(value)
            loss = value.square().mean()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        local.zero_grad()
        wanted = whole(batch.to(DEVICE)).square().mean()
        wanted.backward()
        local.step()
        assert_close([loss.detach()], [wanted.detach()])
    for layer, own in zip(layers, whole.layers, strict=True):
        module = layer.get_module_rref()
        found = rpc.rpc_sync(module.owner(), models.parameters_of, (module,))
        assert_close(found, [parameter.detach() for parameter in own.parameters()])


def test_gradients_are_clipped_over_all_workers(group: Cluster) -> None:
    layers = remote_layers(f"worker0/{DEVICE}", "worker1", f"driver/{DEVICE}")
    references = [each for layer in layers for each in layer.remote_parameters()]
    whole = WholeModel()
    with autograd.context() as context_id:
        value = layers[0](inputs().to(DEVICE))
        value = layers[1](value.cpu()).to(DEVICE)
        autograd.backward(context_id, [layers[2](value).square().sum()])
        norm = clip_grad_norm_(context_id, references, 0.5)
    whole(inputs().to(DEVICE)).square().sum().backward()
    wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    torch.testing.assert_close(float(norm), float(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("placement", ["worker1/{}", "rank:2/{}"])
def test_a_remote_module_has_its_parameters_on_its_device(group: Cluster, placement: str) -> None:
    (module,) = remote_layers(placement.format(DEVICE))
    wanted = make_layer(0).to(DEVICE)
    reference = module.get_module_rref()
    assert reference.owner_name() == "worker1"
    found = rpc.rpc_sync("worker1", models.parameters_of, (reference,))
    assert_close(found, [parameter.detach() for parameter in wanted.parameters()])
    # Arguments on the CPU are moved there, in containers too.
    for value in (inputs(), inputs().to(DEVICE)):
        result = module(value)
        assert result.device in (DEVICE, CPU)
        assert_close([result.to(DEVICE).detach()], [wanted(inputs().to(DEVICE)).detach()])


def test_the_gradient_of_an_argument_that_was_moved_is_on_the_cpu(group: Cluster) -> None:
    (module,) = remote_layers(f"worker1/{DEVICE}")
    here, layer = inputs().requires_grad_(), make_layer(0).to(DEVICE)
    with autograd.context() as context_id:
        autograd.backward(context_id, [module(here).square().mean()])
        found = autograd.get_gradients(context_id)[here]
    assert_close([found], torch.autograd.grad(layer(here.to(DEVICE)).square().mean(), here))


def test_a_remote_module_on_a_device_that_its_worker_lacks(group: Cluster) -> None:
    with pytest.raises(ConfigurationError, match=r"worker 'worker1' has no device 'cuda:77'"):
        RemoteModule("worker1/cuda:77", nn.Linear, args=(2, 2))
    (module,) = remote_layers(f"worker1/{DEVICE}")
    assert module(inputs()).shape == (models.ROWS, models.WIDTHS[1])
