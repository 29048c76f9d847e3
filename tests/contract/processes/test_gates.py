"""Graphs that wait for themselves run as in one process: each node, hook and callback once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import remains
from tests.contract.processes import gate_functions as functions
from tests.contract.processes.gate_functions import BLOCKS, at_once, called, leaf
from torchweft import autograd, rpc
from torchweft.errors import AutogradError
from torchweft.launch import Nursery, cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")

FIRST, SECOND = "worker0", "worker1"
STEPS = 4
no_compiler = pytest.mark.skipif(not hasattr(torch, "compile"), reason="torch has no compiler")


@pytest.fixture(scope="module")
def _workers(nursery: Nursery) -> Iterator[None]:
    # One thread for tasks: a gate must not keep it from other calls.
    options = rpc.RpcBackendOptions(num_worker_threads=1, rpc_timeout=20.0)
    with cluster(workers=2, nursery=nursery, rpc_backend_options=options):
        yield


@pytest.fixture
def _leaves_nothing(_workers: None) -> Iterator[None]:
    functions.take_noted()
    yield
    remains.await_no_autograd()


together = pytest.mark.usefixtures("_leaves_nothing")


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def residual(call: Any, block: Callable[..., Tensor]) -> tuple[Tensor, list[Tensor]]:
    weight, value = leaf(1), leaf(2)
    return functions.residual(call, block, weight, value, FIRST, STEPS).sum(), [weight, value]


def run_both(block: Callable[..., Tensor]) -> tuple[dict[str, int], dict[str, int]]:
    """Checks the gradients of a chain; returns what has happened in the model, and with workers."""
    loss, leaves = residual(at_once, block)
    loss.backward()
    expected = functions.take_noted()
    with autograd.context() as context_id:
        loss, mine = residual(called, block)
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)
    assert_close([found[each] for each in mine], [each.grad for each in leaves])
    return expected, functions.take_noted()


@together
@pytest.mark.parametrize("name", BLOCKS)
def test_a_residual_block_runs_as_in_one_process(name: str) -> None:
    functions.local.name = "the thread that calls backward"
    expected, found = run_both(BLOCKS[name])
    assert expected
    assert found == expected


@together
@no_compiler
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_residual_block_has_the_gradients_of_one_process() -> None:
    run_both(functions.compiled)


@together
@no_compiler
@pytest.mark.thorough  # The test above shows that nodes of compiled functions may be in gates.
@pytest.mark.filterwarnings("ignore")
def test_a_residual_block_that_inductor_has_compiled_has_the_gradients_of_one_process() -> None:
    run_both(functions.compiled_to_code)


@together
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_finds_nothing_in_healthy_functions() -> None:
    with torch.autograd.detect_anomaly():
        run_both(BLOCKS["queueing"])


@together
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_at_the_callee_runs_as_in_one_process(name: str) -> None:
    functions.local.name = "another"
    check_callee(name)


@together
@no_compiler
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_block_at_the_callee_has_the_gradients_of_one_process() -> None:
    check_callee("compiled")


def check_callee(name: str) -> None:
    fed = leaf(2)
    functions.begin_state()
    functions.decoded(at_once, name, fed, FIRST, STEPS).backward()
    expected = functions.take_noted()
    wanted = functions.state_gradient(0)
    with autograd.context() as context_id:
        mine = leaf(2)
        rpc.rpc_sync(FIRST, functions.begin_state)
        autograd.backward(context_id, [functions.decoded(called, name, mine, FIRST, STEPS)])
        found = autograd.get_gradients(context_id)[mine]
        there = rpc.rpc_sync(FIRST, functions.state_gradient, (context_id,))
    assert_close([found, there], [fed.grad, wanted])
    assert rpc.rpc_sync(FIRST, functions.take_noted) == expected


@together
def test_nothing_behind_an_unused_tensor_runs() -> None:
    """One of two tensors of a message is not used, and only the worker behind knows."""

    def program(call: Any) -> tuple[Tensor, list[Tensor]]:
        weight, value = leaf(1), leaf(2)
        hooked: list[Tensor] = []
        for step in range(STEPS):
            sent = torch.tanh(value * weight)
            unused = functions.Noting.apply(sent * weight, "unused here")
            unused.register_hook(lambda gradient: gradient * 2)  # It fails for None.
            hooked.append(unused)
            used, other = call(FIRST, functions.two, sent, unused)
            value = used + sent if step else used * other + sent
        return value.sum(), [weight, value]

    loss, leaves = program(at_once)
    loss.backward()
    expected = functions.take_noted()
    with autograd.context() as context_id:
        loss, mine = program(called)
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)
    assert_close(found[mine[0]], leaves[0].grad)
    there = rpc.rpc_sync(FIRST, functions.take_noted)
    assert {**functions.take_noted(), **there} == expected == {"unused here": 1, "unused": 1}


@together
def test_second_derivatives() -> None:
    def second(weight: Tensor, first: Tensor) -> Tensor:
        return (first * first).sum() + weight.sum() * 0

    loss, (weight, _) = residual(at_once, BLOCKS["hooked_everywhere"])
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    (wanted,) = torch.autograd.grad(second(weight, first), weight)
    with autograd.context() as context_id:
        loss, (weight, _) = residual(called, BLOCKS["hooked_everywhere"])
        (first,) = autograd.grad(context_id, loss, weight, create_graph=True)
        (found,) = autograd.grad(context_id, second(weight, first), weight)
    assert_close(found, wanted)


@together
def test_two_passes_on_a_retained_graph_add_up() -> None:
    loss, leaves = residual(at_once, BLOCKS["hooked_everywhere"])
    for _ in range(2):
        loss.backward(retain_graph=True)
    with autograd.context() as context_id:
        loss, mine = residual(called, BLOCKS["hooked_everywhere"])
        autograd.backward(context_id, [loss], retain_graph=True)
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)
    assert_close([found[each] for each in mine], [each.grad for each in leaves])


@together
def test_a_hook_may_differentiate_a_part_of_the_running_graph() -> None:
    """What that pass finds at a received tensor is no part of the running one."""

    def program(call: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        value, slopes = leaf(), list[Tensor]()
        sent = value.tanh()
        received = call(FIRST, functions.sine, sent)
        total = received + sent
        other = total.square().sum()

        def differentiate(_: Tensor) -> None:
            slopes.extend(torch.autograd.grad(other, received, retain_graph=True))

        result = total * 3
        result.register_hook(differentiate)
        return value, result.sum(), slopes

    value, loss, expected = program(at_once)
    loss.backward()
    with autograd.context() as context_id:
        mine, loss, slopes = program(called)
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)[mine]
    assert_close(slopes, expected)
    assert_close(found, value.grad)


@together
def test_outside_of_contexts_gradients_add_to_grad() -> None:
    def program(call: Any) -> tuple[Tensor, list[Tensor]]:
        weight, value = leaf(1), leaf(2)
        return functions.residual(call, torch.mul, weight, value, FIRST, STEPS).sum(), [
            weight,
            value,
        ]

    loss, leaves = program(at_once)
    loss.backward()
    loss, mine = program(called)
    autograd.backward(loss)
    assert_close([each.grad for each in mine], [each.grad for each in leaves])


@together
def test_graphs_of_several_threads_in_one_pass() -> None:
    """Each thread numbers its nodes by itself, so the order of the engine must not go by that."""

    def program(call: Any) -> tuple[Tensor, list[Tensor]]:
        weight, value = leaf(1), leaf(2)
        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            for _ in range(20):  # This thread's nodes have higher numbers than the other's.
                value = value * 1.01
            for step in range(2 * STEPS):
                pool = (first, second)[step % 2]

                def run(value: Tensor = value) -> Tensor:
                    sent = torch.tanh(value * weight)
                    result: Tensor = call(FIRST, functions.sine, sent) + sent
                    return result

                value = pool.submit(copy_context().run, run).result() + value * 0.5
        return value.sum(), [weight, value]

    loss, (weight, _) = program(at_once)
    loss.backward()
    with autograd.context() as context_id:
        loss, (mine, _) = program(called)
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)[mine]
    assert_close(found, weight.grad)


@together
def test_passes_of_several_threads_at_once() -> None:
    loss, leaves = residual(at_once, BLOCKS["hooked_everywhere"])
    loss.backward()

    def run(_: int) -> list[Tensor]:
        with autograd.context() as context_id:
            loss, mine = residual(called, BLOCKS["hooked_everywhere"])
            autograd.backward(context_id, [loss])
            found = autograd.get_gradients(context_id)
            return [found[each] for each in mine]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, range(8)):
            assert_close(found, [each.grad for each in leaves])


@together
def test_a_worker_serves_calls_while_its_gate_waits() -> None:
    """Its only thread for tasks is in the gate, and the driver's graph halts."""
    with autograd.context() as context_id:
        rpc.rpc_sync(FIRST, functions.begin_state)
        fed = rpc.rpc_sync(FIRST, functions.advance, ("queueing", leaf(2)))
        loss = rpc.rpc_sync(FIRST, functions.advance, ("queueing", functions.Halting.apply(fed)))
        failures: list[BaseException] = []
        arguments = (context_id, loss.sum(), failures)
        leader = threading.Thread(target=functions.backward_noting, args=arguments)
        leader.start()
        functions.await_halt("driver", 1)
        for _ in range(3):
            assert rpc.rpc_sync(FIRST, functions.halts, timeout=5) == 0
        functions.go_on()
        leader.join(20)
        assert not leader.is_alive()
        assert not failures


@together
def test_an_error_in_the_graph_of_the_driver_names_the_operation() -> None:
    with autograd.context() as context_id:
        loss, _ = residual(called, functions.failing)
        with pytest.raises(AutogradError, match="no slope here") as caught:
            autograd.backward(context_id, [loss])
    assert (caught.value.worker, caught.value.operation) == ("driver", "Failing.backward")


@together
def test_an_error_elsewhere_ends_all_gates() -> None:
    with autograd.context() as context_id:
        weight, value = leaf(1), leaf(2)
        for _ in range(STEPS):
            sent = torch.tanh(value * weight)
            value = rpc.rpc_sync(FIRST, functions.failing_sine, (sent,)) + sent
        with pytest.raises(AutogradError, match="no slope here") as caught:
            autograd.backward(context_id, [value.sum()])
    assert (caught.value.worker, caught.value.operation) == (FIRST, "Failing.backward")
    rpc.rpc_sync(FIRST, functions.take_noted)
