"""Backward passes outside of contexts, into ``.grad`` on every worker, as in one process."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests import remains
from tests.contract.processes import outside_functions as functions
from torchweft import mapreduce, rpc
from torchweft.autograd import backward, context, current_context_id, get_gradients
from torchweft.errors import ArgumentTypeError, AutogradError, ConfigurationError
from torchweft.launch import Nursery, cluster

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")

DRIVER, FIRST, SECOND = EVERYBODY = ("driver", "worker0", "worker1")
LIMIT_S = 10.0
X = torch.tensor([0.5, -1.0, 2.0])
W = functions.weight.detach()


@pytest.fixture(scope="module")
def _workers(nursery: Nursery) -> Iterator[None]:
    with cluster(workers=2, nursery=nursery):
        yield


@pytest.fixture(autouse=True)
def _leaves_nothing(_workers: None) -> Iterator[None]:
    yield
    gc.collect()
    for worker in (FIRST, SECOND):
        rpc.rpc_sync(worker, functions.forget)
    remains.await_no_autograd(remains.of_autograd_outside)


def gradient_on(worker: str) -> Tensor:
    found: Tensor | None = rpc.rpc_sync(worker, functions.take_gradient)
    assert found is not None, f"{worker} has no gradient"
    return found


def recorded_by_both() -> tuple[tuple[int, int], tuple[int, int]]:
    query = remains.messages_recorded
    return query(), rpc.rpc_sync(FIRST, query)


def mine() -> Tensor:
    return X.clone().requires_grad_()


def expected(model: Callable[..., Tensor], count: int) -> list[Tensor]:
    """Returns the gradients of ``x`` and of the weights of ``count`` workers."""
    leaves = [X.clone(), *[W.clone() for _ in range(count)]]
    for leaf in leaves:
        leaf.requires_grad_()
    return list(torch.autograd.grad(model(*leaves), leaves))


def assert_close(actual: object, wanted: object) -> None:
    torch.testing.assert_close(actual, wanted)


def test_there_and_back() -> None:
    x = mine()
    loss = rpc.rpc_sync(FIRST, functions.layer, (x.exp(),)).sum()
    backward(loss)
    x_grad, w_grad = expected(lambda x, w: (x.exp() * w).sum(), 1)
    assert_close(x.grad, x_grad)
    assert_close(gradient_on(FIRST), w_grad)


def test_it_adds_up_over_passes() -> None:
    x = mine()
    for _ in range(3):
        backward(rpc.rpc_sync(FIRST, functions.layer, (x.exp(),)).sum())
    x_grad, w_grad = expected(lambda x, w: (x.exp() * w).sum(), 1)
    assert_close(x.grad, 3 * x_grad)
    assert_close(gradient_on(FIRST), 3 * w_grad)


def test_calls_within_calls_and_several_of_them() -> None:
    x = mine()
    first = rpc.rpc_async(FIRST, functions.relay, (SECOND, x * 2)).wait()
    second = rpc.remote(SECOND, functions.layer, (first,)).to_here()
    backward([second.sum(), first.prod()])

    def model(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        first = x * 2 * v * w + v
        return (first * w).sum() + first.prod()

    x_grad, v_grad, w_grad = expected(model, 2)
    assert_close(x.grad, x_grad)
    assert_close(gradient_on(FIRST), v_grad)
    assert_close(gradient_on(SECOND), w_grad)


def test_results_that_are_not_used_and_state_that_is_kept() -> None:
    x = mine()
    both = rpc.rpc_sync(FIRST, functions.layers, (x * 1,))
    rpc.rpc_sync(FIRST, functions.keep, (x.sin(),))
    again = rpc.rpc_sync(FIRST, functions.use_kept, (x.cos(),))
    backward(both["used"].sum() + again.sum())

    def model(x: Tensor, w: Tensor) -> Tensor:
        return 2 * torch.tanh(x * w).sum() + (torch.tanh(x.sin() * w) * x.cos()).sum()

    x_grad, w_grad = expected(model, 1)
    assert_close(x.grad, x_grad)
    assert_close(gradient_on(FIRST), w_grad)


def test_a_pass_that_the_callee_leads() -> None:
    x = mine()
    rpc.rpc_sync(FIRST, functions.train, (x * 2,))
    x_grad, w_grad = expected(lambda x, w: (2 * x * w).sum(), 1)
    assert_close(x.grad, x_grad)
    assert_close(gradient_on(FIRST), w_grad)


def test_gradients_at_roots_and_graphs_that_are_kept() -> None:
    x = mine()
    result = rpc.rpc_sync(FIRST, functions.layer, (x * 1,))
    backward([result], grad_tensors=[X], retain_graph=True)
    backward([result], grad_tensors=[X])
    assert_close(x.grad, 2 * X * W)
    assert_close(gradient_on(FIRST), 2 * X * X)
    with pytest.raises(AutogradError, match="second time"):
        backward(result.sum())


def test_forward_before_the_context() -> None:
    x = mine()
    result = rpc.rpc_sync(FIRST, functions.relay, (SECOND, x * 1))
    with context() as context_id:
        backward(context_id, [result.sum()])
        x_grad, v_grad, w_grad = expected(lambda x, v, w: (x * v * w + v).sum(), 2)
        assert_close(get_gradients(context_id)[x], x_grad)
        assert_close(rpc.rpc_sync(FIRST, functions.gradient_in, (context_id,)), v_grad)
        assert_close(rpc.rpc_sync(SECOND, functions.gradient_in, (context_id,)), w_grad)
    assert x.grad is None
    assert rpc.rpc_sync(FIRST, functions.take_gradient) is None


def test_micro_batches_of_a_thread_pool() -> None:
    x = mine()
    with context() as context_id, ThreadPoolExecutor(2) as pool:
        losses = list(
            pool.map(lambda k: rpc.rpc_sync(FIRST, functions.layer, (x * k,)).sum(), range(4))
        )
        losses.append(rpc.rpc_sync(FIRST, functions.layer, (x * 10,)).sum())
        backward(context_id, losses)
        assert_close(get_gradients(context_id)[x], 16 * W)
        assert_close(rpc.rpc_sync(FIRST, functions.gradient_in, (context_id,)), 16 * X)


def test_in_a_context_it_is_for_that_context() -> None:
    x = mine()
    with context() as context_id:
        backward(rpc.rpc_sync(FIRST, functions.layer, (x * 1,)).sum())
        assert_close(get_gradients(context_id)[x], W)
        assert x.grad is None


def test_a_map() -> None:
    x = mine()
    batch = torch.stack([x * 1, x * 2, x * 3])
    cut = mapreduce.dim_partitioner(0, keepdim=True, workers=[FIRST, SECOND])
    results = mapreduce.remote_sync_call(
        functions.layer, args=(batch,), partitioner=cut, reducer=torch.cat
    )
    backward(results.sum())
    assert_close(x.grad, 6 * W)
    assert_close(gradient_on(FIRST) + gradient_on(SECOND), 6 * X)


def test_a_loop_that_never_calls_backward_keeps_nothing() -> None:
    x = mine()
    for _ in range(50):
        result = rpc.rpc_sync(FIRST, functions.layer, (x * 2,))
    deadline_s = time.monotonic() + LIMIT_S
    while (left := rpc.rpc_sync(FIRST, remains.messages_recorded)) != (1, 1):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.01)
    assert remains.messages_recorded() == (1, 1)
    backward(result.sum())
    assert_close(x.grad, 2 * W)


def test_an_open_context_keeps_no_graph_of_other_calls() -> None:
    x = mine()
    others = [rpc.rpc_sync(FIRST, functions.layer, (x * 2,)) for _ in range(3)]
    with context() as context_id:
        loss = rpc.rpc_sync(FIRST, functions.layer, (x * 1,)).sum()
        backward(context_id, [loss])
        kept = others.pop()
        del others
        deadline_s = time.monotonic() + LIMIT_S
        # The pass at the other worker has seen the graphs of all results, and is not over.
        while (left := recorded_by_both()) != ((1, 1), (1, 1)):
            assert time.monotonic() < deadline_s, left
            time.sleep(0.01)
        backward(context_id, [kept.sum()])
        assert_close(get_gradients(context_id)[x], 3 * W)


def test_what_needs_no_gradient_is_not_recorded() -> None:
    with torch.no_grad():
        kept = [rpc.rpc_sync(FIRST, functions.layer, (mine() * 2,))]
    kept.append(rpc.rpc_sync(FIRST, torch.add, (X, X)))
    kept.append(rpc.rpc_sync(FIRST, functions.get_weight))
    assert remains.messages_recorded() == (0, 0)
    assert rpc.rpc_sync(FIRST, remains.messages_recorded) == (0, 0)


def test_errors_and_losses() -> None:
    x = mine()
    result = rpc.rpc_sync(FIRST, functions.broken, (x * 1,))
    with pytest.raises(AutogradError, match="broken on purpose") as caught:
        backward(result.sum())
    assert caught.value.worker == FIRST
    assert x.grad is None


def test_arguments() -> None:
    loss = mine().sum()
    with pytest.raises(ArgumentTypeError, match="has nothing to start from"):
        backward(7)  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="needs a context"):
        backward(loss, create_graph=True)
    with pytest.raises(AutogradError, match="does not require grad"):
        backward(X.sum())


def test_passes_of_several_threads() -> None:
    x = mine()

    def step(_: int) -> None:
        backward(rpc.rpc_sync(FIRST, functions.relay, (SECOND, x * 1)).sum())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(step, range(20)))
    x_grad, v_grad, w_grad = expected(lambda x, v, w: (x * v * w + v).sum(), 2)
    assert_close(x.grad, 20 * x_grad)
    assert_close(gradient_on(FIRST), 20 * v_grad)
    assert_close(gradient_on(SECOND), 20 * w_grad)


# Which context a thread or task records into


def test_tasks_that_take_turns_keep_their_contexts() -> None:
    async def step(factor: float) -> tuple[Tensor, int]:
        x = mine()
        with context() as context_id:
            value = x * factor
            for _ in range(3):
                value = await rpc.rpc_async(FIRST, functions.layer, (value,))
                await asyncio.sleep(0)
            backward(context_id, [value.sum()])
            return get_gradients(context_id)[x], current_context_id() - context_id

    async def all_steps() -> list[tuple[Tensor, int]]:
        return await asyncio.gather(*[step(float(factor)) for factor in range(1, 5)])

    for factor, (gradient, difference) in enumerate(asyncio.run(all_steps()), start=1):
        assert_close(gradient, factor * W**3)
        assert difference == 0


def test_an_async_function_keeps_a_context_that_it_opens() -> None:
    assert rpc.rpc_sync(FIRST, functions.step_in_a_context, (SECOND, X)) is True
