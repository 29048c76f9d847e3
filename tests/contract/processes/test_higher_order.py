"""Gradients of gradients through real workers equal those of a single process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchweft
from tests import higher_order_programs, remains
from tests.contract.processes import autograd_functions
from tests.contract.processes import higher_order_functions as functions
from tests.higher_order_random import random_program
from tests.higher_order_sites import Program, assert_equal, expected
from tests.thorough import lots
from torchweft import rpc
from torchweft.launch import Nursery, cluster
from torchweft.optim import DistributedOptimizer

pytestmark = pytest.mark.keeps("threads", "descriptors")

TOLERANCE = 1e-10
LIMIT_S = 20.0
LOT = 50
DRIVER, FIRST, SECOND = EVERYBODY = ("driver", "worker0", "worker1")


@pytest.fixture(scope="module")
def _workers(nursery: Nursery) -> Iterator[None]:
    options = rpc.RpcBackendOptions(num_worker_threads=2, rpc_timeout=60.0)
    with cluster(workers=2, nursery=nursery, rpc_backend_options=options):
        yield


@pytest.fixture(autouse=True)
def _leaves_nothing(_workers: None) -> Iterator[None]:
    """Checks that no context and no pass is left on any worker."""
    yield
    remains.await_no_autograd()


def assert_close(actual: Any, wanted: Any) -> None:
    torch.testing.assert_close(actual, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def leaf(worker: str, name: str, *shape: int) -> Tensor:
    return autograd_functions.initial(worker, name, *(shape or (3,)))


def layer(value: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(value * weight)


def assert_no_gradients(context_id: int) -> None:
    for worker in EVERYBODY:
        assert rpc.rpc_sync(worker, autograd_functions.gradients, (context_id,)) == {}


# Programs


@pytest.mark.parametrize("program", higher_order_programs.ALL, ids=lambda each: each.__name__)
def test_programs_equal_a_single_process(program: Program) -> None:
    assert_equal(functions.run_on_workers(program), expected(program), TOLERANCE)


@pytest.mark.parametrize("lot", lots(200, LOT), ids=str)
def test_random_programs_equal_a_single_process(lot: range) -> None:
    for seed in lot:
        program = random_program(seed)
        actual = functions.run_on_workers(program)
        what = f"program {seed}:\n{program.__doc__}"
        assert_equal(actual, expected(program), TOLERANCE, what)


def test_programs_of_several_threads_side_by_side() -> None:
    programs = [
        higher_order_programs.maml_within_a_call,
        higher_order_programs.descent_within_descent,
        higher_order_programs.tasks_side_by_side,
        higher_order_programs.hooked_circle,
    ]
    outcomes: dict[int, Any] = {}

    def run(number: int) -> None:
        for _ in range(3):
            outcomes[number] = functions.run_on_workers(programs[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert len(outcomes) == len(programs)
    for number, program in enumerate(programs):
        assert_equal(outcomes[number], expected(program), TOLERANCE)


def test_passes_side_by_side_in_one_context() -> None:
    """While graphs are retained, threads may call ``grad`` at once, also for second order."""
    start, weight = leaf(DRIVER, "x"), leaf(FIRST, "w")
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x")
        loss = rpc.rpc_sync(FIRST, functions.layer, (value.exp(),)).prod()
        (slope,) = torchweft.autograd.grad(context_id, loss, value, create_graph=True)
        found: list[tuple[Tensor, ...]] = []

        def ask() -> None:
            for _ in range(10):
                found.append(
                    torchweft.autograd.grad(context_id, slope.prod(), value, retain_graph=True)
                    + torchweft.autograd.grad(context_id, loss, value, create_graph=True)
                )

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
    (first,) = torch.autograd.grad(layer(start.exp(), weight).prod(), start, create_graph=True)
    (second,) = torch.autograd.grad(first.prod(), start)
    assert len(found) == 30
    for each in found:
        assert_close(each, (second, first))


def test_whole_programs_led_by_other_workers() -> None:
    weights = functions.parameter("weights")
    with torchweft.autograd.context() as context_id:
        waits = [
            rpc.rpc_async(worker, functions.descend, (weights, other, 3))
            for worker, other in ((FIRST, SECOND), (SECOND, FIRST), (FIRST, DRIVER))
        ]
        total = torch.stack([wait.wait() for wait in waits]).prod(0).sum()
        (gradient,) = torchweft.autograd.grad(context_id, total, weights, create_graph=True)
        torchweft.autograd.backward(context_id, [gradient.pow(2).sum()])
        tables = {
            worker: rpc.rpc_sync(worker, autograd_functions.gradients, (context_id,))
            for worker in EVERYBODY
        }
    start = leaf(DRIVER, "weights")
    rates = {worker: leaf(worker, "rate") for worker in (FIRST, SECOND)}
    goals = {worker: leaf(worker, "goal") for worker in EVERYBODY}
    parts = [
        functions.model_of_descent(start, rates[worker], goals[other], 3)
        for worker, other in ((FIRST, SECOND), (SECOND, FIRST), (FIRST, DRIVER))
    ]
    (wanted,) = torch.autograd.grad(torch.stack(parts).prod(0).sum(), start, create_graph=True)
    wanted.pow(2).sum().backward()  # type: ignore[no-untyped-call]
    assert_close(gradient.detach(), wanted.detach())
    assert_close(tables[DRIVER], {"weights": start.grad, "goal": goals[DRIVER].grad})
    for worker in (FIRST, SECOND):
        assert_close(tables[worker], {"rate": rates[worker].grad, "goal": goals[worker].grad})


# Requested gradients


def test_single_tensors_and_sequences_are_the_same() -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x")
        result = rpc.rpc_sync(FIRST, functions.layer, (value,))
        weight = torch.full((3,), 2.0, dtype=torch.float64)
        found = [
            torchweft.autograd.grad(context_id, outputs, inputs, weights, retain_graph=True)
            for outputs in (result, [result], (result,))
            for inputs in (value, [value], (value,))
            for weights in (weight, [weight], (weight,))
        ]
        assert_no_gradients(context_id)
        assert value.grad is None
    assert all(type(each) is tuple and torch.equal(each[0], found[0][0]) for each in found)


def test_gradients_of_what_is_not_asked_for_are_not_computed() -> None:
    """Like ``torch.autograd.grad``, runs no hooks of other leaves or functions leading to them."""
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x")
        beside = rpc.rpc_sync(SECOND, functions.broken_beside, (value,))
        result = rpc.rpc_sync(FIRST, functions.layer, (value,))
        (gradient,) = torchweft.autograd.grad(context_id, (result * beside).sum(), value)
    start = leaf(DRIVER, "x")
    total = (layer(start, leaf(FIRST, "w")) * (leaf(SECOND, "v") + start.detach())).sum()
    assert_close(gradient, torch.autograd.grad(total, start)[0])


def test_hooks_of_leaves_that_are_not_asked_for_are_not_called() -> None:
    with torchweft.autograd.context() as context_id:
        value, other = functions.parameter("x"), torch.ones(3, dtype=torch.float64)
        other.requires_grad_()
        called: list[Tensor] = []
        other.register_hook(called.append)
        result = rpc.rpc_sync(FIRST, functions.layer, (value * other,))
        torchweft.autograd.grad(context_id, result.sum(), value, retain_graph=True)
        assert called == []
        torchweft.autograd.grad(context_id, result.sum(), other)
        assert len(called) == 1


def test_hooks_see_whole_gradients_once_in_each_pass() -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x") * 1
        result = rpc.rpc_sync(FIRST, functions.note_calls, (value,))
        (gradient,) = torchweft.autograd.grad(context_id, result.sum(), value, create_graph=True)
        first = rpc.rpc_sync(FIRST, functions.take_notes)
        torchweft.autograd.grad(context_id, gradient.sum(), value)
        second = rpc.rpc_sync(FIRST, functions.take_notes)
    seen: list[Tensor] = []
    start = leaf(DRIVER, "x") * 1
    made = layer(start, leaf(FIRST, "w"))
    made.register_hook(lambda each: seen.append(each.detach().clone()))
    total = (made * 2 + made.sin()).sum()
    (slope,) = torch.autograd.grad(total, start, create_graph=True)
    torch.autograd.grad(slope.sum(), start)
    assert_close([*first, *second], seen)


def test_the_graph_is_freed_or_kept_as_in_one_process() -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x")
        loss = rpc.rpc_sync(FIRST, functions.layer, (value,)).sum()
        (gradient,) = torchweft.autograd.grad(context_id, loss, value, create_graph=True)
        torchweft.autograd.grad(context_id, gradient.sum(), value)
        with pytest.raises(torchweft.errors.AutogradError, match="second time"):
            torchweft.autograd.grad(context_id, gradient.sum(), value)
        with pytest.raises(torchweft.errors.AutogradError, match="second time"):
            torchweft.autograd.grad(context_id, loss, value)
        # The failures have left the context usable.
        loss = rpc.rpc_sync(SECOND, functions.layer, (value,)).sum()
        torchweft.autograd.backward(context_id, [loss], create_graph=True)
        torchweft.autograd.backward(context_id, [loss])
        gradients = torchweft.autograd.get_gradients(context_id)
        assert_close(gradients[value].detach(), 2 * slope_of_layer(SECOND))


def slope_of_layer(worker: str) -> Tensor:
    start = leaf(DRIVER, "x")
    return torch.autograd.grad(layer(start, leaf(worker, "w")).sum(), start)[0]


def test_create_graph_without_retain_graph() -> None:
    """The graph of the gradient refers to what the first pass has freed."""
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x")
        loss = rpc.rpc_sync(FIRST, functions.layer, (value,)).sum()
        (gradient,) = torchweft.autograd.grad(
            context_id, loss, value, retain_graph=False, create_graph=True
        )
        assert_close(gradient.detach(), slope_of_layer(FIRST))
        with pytest.raises(torchweft.errors.AutogradError, match="second time"):
            torchweft.autograd.grad(context_id, loss, value)


def test_gradients_taken_from_a_context_stay_as_they_are() -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x")
        loss = rpc.rpc_sync(FIRST, functions.layer, (value,)).prod()
        torchweft.autograd.backward(context_id, [loss], create_graph=True)
        first = torchweft.autograd.get_gradients(context_id)[value]
        before = first.detach().clone()
        for _ in range(3):
            torchweft.autograd.backward(context_id, [loss], retain_graph=True)
        assert torch.equal(first, before)
        (second,) = torchweft.autograd.grad(context_id, first.pow(2).sum(), value)
        sums = torchweft.autograd.get_gradients(context_id)[value]
        assert_close(sums.detach(), 4 * before)
    start = leaf(DRIVER, "x")
    wanted = layer(start, leaf(FIRST, "w")).prod()
    (slope,) = torch.autograd.grad(wanted, start, create_graph=True)
    assert_close(second, torch.autograd.grad(slope.pow(2).sum(), start)[0])


def test_gradients_without_a_graph_have_none() -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x")
        weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
        result = rpc.rpc_sync(FIRST, functions.layer, (value,))
        (gradient,) = torchweft.autograd.grad(context_id, result, value, weight, retain_graph=True)
        assert not gradient.requires_grad
        torchweft.autograd.backward(context_id, [result], grad_tensors=[weight])
        assert not torchweft.autograd.get_gradients(context_id)[value].requires_grad


def test_two_contexts_do_not_mix() -> None:
    value = functions.parameter("x")
    with torchweft.autograd.context() as outer:
        first = rpc.rpc_sync(FIRST, functions.layer, (value,)).prod()
        (slope,) = torchweft.autograd.grad(outer, first, value, create_graph=True)
        with torchweft.autograd.context() as inner:
            second = rpc.rpc_sync(FIRST, functions.layer, (value * 2,)).prod()
            torchweft.autograd.backward(inner, [second], create_graph=True)
            assert_no_gradients(outer)
        torchweft.autograd.backward(outer, [slope.pow(2).sum()])
        actual = rpc.rpc_sync(FIRST, autograd_functions.gradients, (outer,))["w"]
    start, weight = leaf(DRIVER, "x"), leaf(FIRST, "w")
    (wanted,) = torch.autograd.grad(layer(start, weight).prod(), start, create_graph=True)
    assert_close(actual, torch.autograd.grad(wanted.pow(2).sum(), weight)[0])


def test_the_current_context_is_that_of_the_caller() -> None:
    with torchweft.autograd.context() as context_id:
        assert torchweft.autograd.current_context_id() == context_id
        assert rpc.rpc_sync(FIRST, functions.context_id_here) == context_id
        both = rpc.rpc_sync(FIRST, functions.context_id_after_waiting, (SECOND,))
        assert both == (context_id, context_id)
        with torchweft.autograd.context() as inner:
            assert rpc.rpc_sync(FIRST, functions.context_id_here) == inner
        assert rpc.rpc_sync(FIRST, functions.context_id_here) == context_id
    for ask in (functions.context_id_here, lambda: rpc.rpc_sync(FIRST, functions.context_id_here)):
        with pytest.raises(torchweft.errors.AutogradError, match="context"):
            ask()


# Kinds of tensors and functions


@pytest.mark.parametrize("count", [100, 3_000, 20_000, 400_000])
def test_gradients_of_every_size(count: int) -> None:
    start = torch.linspace(0.5, 1.5, count, dtype=torch.float64, requires_grad=True)
    with torchweft.autograd.context() as context_id:
        result = rpc.rpc_sync(FIRST, functions.sine_of_large, (start,))
        (first,) = torchweft.autograd.grad(context_id, result.sum(), start, create_graph=True)
        (second,) = torchweft.autograd.grad(context_id, first.pow(2).sum(), start)
    result = functions.sine_of_large(start)
    (wanted,) = torch.autograd.grad(result.sum(), start, create_graph=True)
    assert_close(first.detach(), wanted.detach())
    assert_close(second, torch.autograd.grad(wanted.pow(2).sum(), start)[0])


@pytest.mark.parametrize("size", [4, 60, 500])
def test_gradients_that_are_not_contiguous(size: int) -> None:
    start = torch.linspace(0.5, 1.5, size * size, dtype=torch.float64).reshape(size, size)
    start.requires_grad_()

    def slopes(compute: Any, grad: Any) -> tuple[Tensor, Tensor]:
        result = compute(start.t())
        # Transposed, then expanded: the gradient is not contiguous, and its elements share memory.
        (first,) = grad(result.t().sum(), start, create_graph=True)
        (second,) = grad((first.t() * start[0]).pow(2).sum(), start)
        return first.detach(), second

    with torchweft.autograd.context() as context_id:
        actual = slopes(
            lambda value: rpc.rpc_sync(FIRST, functions.sine_of_large, (value,)),
            lambda *given, **options: torchweft.autograd.grad(context_id, *given, **options),
        )
    assert_close(actual, slopes(functions.sine_of_large, torch.autograd.grad))


def test_single_precision() -> None:
    start = torch.linspace(0.5, 1.5, 5, requires_grad=True)
    with torchweft.autograd.context() as context_id:
        result = rpc.rpc_sync(FIRST, functions.power, (start.double(),)).float()
        (first,) = torchweft.autograd.grad(context_id, result.sum(), start, create_graph=True)
        (second,) = torchweft.autograd.grad(context_id, first.pow(2).sum(), start)
    assert first.dtype == second.dtype == torch.float32
    torch.testing.assert_close(first.detach(), 3 * start.detach() ** 2)
    torch.testing.assert_close(second, 36 * start.detach() ** 3)


def test_modules_and_parameters_as_arguments() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    module = module.double()
    value = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)
    weights = list(module.parameters())

    def slopes(result: Tensor, grad: Any) -> list[Tensor]:
        first = grad(result.pow(2).sum(), weights, create_graph=True)
        total = torch.stack([each.pow(2).sum() for each in first]).sum()
        return [each.detach() for each in first] + list(grad(total, weights))

    scale = functions.parameter("x")
    with torchweft.autograd.context() as context_id:
        claim, powers = rpc.rpc_sync(FIRST, functions.is_parameter, (scale,))
        assert claim
        (first,) = torchweft.autograd.grad(context_id, powers.sum(), scale, create_graph=True)
        (second,) = torchweft.autograd.grad(context_id, first.sum(), scale)
        assert_close(second, 6 * scale.detach() * leaf(FIRST, "w").detach())
    with torchweft.autograd.context() as context_id:
        actual = slopes(
            rpc.rpc_sync(FIRST, functions.affine, (module, value)),
            lambda *given, **options: torchweft.autograd.grad(context_id, *given, **options),
        )
    assert_close(actual, slopes(module(value), torch.autograd.grad))


def test_references_are_differentiated_twice() -> None:
    start = functions.parameter("x")
    with torchweft.autograd.context() as context_id:
        reference = rpc.remote(FIRST, functions.layer, (start,))
        further = rpc.remote(SECOND, autograd_functions.add, (reference, reference))
        total = (further.to_here() * reference.to_here()).sum()
        (first,) = torchweft.autograd.grad(context_id, total, start, create_graph=True)
        (second,) = torchweft.autograd.grad(context_id, first.pow(2).sum(), start)
        del reference, further
    start = leaf(DRIVER, "x")
    value = layer(start, leaf(FIRST, "w"))
    total = ((value + value.exp()) * value).sum()
    (wanted,) = torch.autograd.grad(total, start, create_graph=True)
    assert_close(first.detach(), wanted.detach())
    assert_close(second, torch.autograd.grad(wanted.pow(2).sum(), start)[0])


@pytest.mark.parametrize("worker", [DRIVER, FIRST])
def test_calls_made_by_a_backward_pass_are_recorded(worker: str) -> None:
    """A custom function gets its slope from another worker; the slope then has a graph."""
    start = torch.linspace(0.5, 1.5, 3, dtype=torch.float64, requires_grad=True)
    with torchweft.autograd.context() as context_id:
        value = start * 1
        if worker == DRIVER:
            result = functions.with_remote_backward(value, SECOND)
        else:
            result = rpc.rpc_sync(worker, functions.with_remote_backward, (value, SECOND))
        (first,) = torchweft.autograd.grad(context_id, result.sum(), start, create_graph=True)
        (second,) = torchweft.autograd.grad(context_id, first.sum(), start)
    assert_close(first.detach(), start.detach() ** 3)
    assert_close(second, 3 * start.detach() ** 2)


def test_an_optimizer_takes_steps_with_a_gradient_penalty() -> None:
    """Its gradients come from passes that record a graph."""
    start = torch.linspace(0.5, 1.5, 3, dtype=torch.float64, requires_grad=True)
    copy = start.detach().clone().requires_grad_()
    local = torch.optim.SGD([copy], lr=0.1)
    weight = leaf(FIRST, "w")
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(start)], lr=0.1)
    for _ in range(3):
        with torchweft.autograd.context() as context_id:
            loss = rpc.rpc_sync(FIRST, functions.layer, (start,)).sum()
            (slope,) = torchweft.autograd.grad(context_id, loss, start, create_graph=True)
            total = loss + slope.pow(2).sum()
            torchweft.autograd.backward(context_id, [total], create_graph=True)
            optimizer.step(context_id)
        loss = layer(copy, weight).sum()
        (slope,) = torch.autograd.grad(loss, copy, create_graph=True)
        (copy.grad,) = torch.autograd.grad(loss + slope.pow(2).sum(), copy)
        local.step()
        assert_close(start.detach(), copy.detach())
    assert start.is_leaf


# Leftovers


def test_contexts_let_go_of_all_graphs() -> None:
    value = functions.parameter("x")
    with torchweft.autograd.context() as context_id:
        result = rpc.rpc_sync(FIRST, functions.watch_nodes, (value.exp(),))
        loss = rpc.rpc_sync(SECOND, functions.watch_nodes, (result,)).prod()
        torchweft.autograd.backward(context_id, [loss], create_graph=True)
        slopes = torchweft.autograd.grad(context_id, loss, [value, result], create_graph=True)
        torchweft.autograd.backward(
            context_id, [slopes[0].pow(2).sum() + slopes[1].sum()], create_graph=True
        )
        for worker in EVERYBODY:
            rpc.rpc_sync(worker, functions.watch_gradients, (context_id,))
            assert rpc.rpc_sync(worker, functions.count_watched) > 0
        del slopes, result, loss
    deadline_s = time.monotonic() + LIMIT_S
    for worker in EVERYBODY:
        while rpc.rpc_sync(worker, functions.count_watched):
            assert time.monotonic() < deadline_s, f"{worker} keeps graphs"
            time.sleep(0.01)
        rpc.rpc_sync(worker, functions.forget_watched)
