"""Batched calls of several workers: gathering, errors, cancellation and gradients."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.contract.processes import batched_functions
from tests.contract.processes.batched_functions import Server, await_waiting, statistics_of
from tests.contract.processes.functions import raised_by
from torchweft import autograd, rpc
from torchweft.errors import (
    ArgumentTypeError,
    BatchError,
    CallCancelled,
    ConfigurationError,
    QueueFull,
)
from torchweft.launch import Cluster
from torchweft.rpc.functions import BatchStatistics, batch_statistics, batched, expect_calls

pytestmark = pytest.mark.keeps("threads", "descriptors")
CALLERS = ("driver", "worker0", "worker1")


# Gathering


def test_calls_of_several_workers_are_one_batch(group: Cluster) -> None:
    server = rpc.remote("worker0", Server)
    made = [
        rpc.rpc_async(name, batched_functions.call_six, (server, 2 * place, 2))
        for place, name in enumerate(CALLERS)
    ]
    for place, future in enumerate(made):
        for number, (row, size) in enumerate(future.wait(), 2 * place):
            assert row == [2.0 * number] * 2
            assert size == 6
    assert server.rpc_sync().seen_runs() == [6]
    found = statistics_of(server, Server.six)
    assert (found.batches, found.calls, found.sizes, found.mean_size) == (1, 6, {6: 1}, 6.0)
    assert found.longest_wait_s >= found.mean_wait_s > 0
    assert (found.waiting, found.failed, found.refused, found.left) == (0, 0, 0, 0)


def test_a_server_says_how_many_calls_make_a_batch(group: Cluster) -> None:
    server = Server()
    reference = rpc.RRef(server)
    for count in (2, 1):
        made = [reference.rpc_async().three(torch.tensor(float(n))) for n in range(count)]
        expect_calls(server.three, count)
        assert [each.wait().item() for each in made] == [n + 1.0 for n in range(count)]
    expect_calls(server.three, 9)  # as many as the largest batch has
    made = [reference.rpc_async().three(torch.tensor(float(n))) for n in range(3)]
    assert [each.wait().item() for each in made] == [1.0, 2.0, 3.0]
    assert batch_statistics(server.three).sizes == {2: 1, 1: 1, 3: 1}
    with pytest.raises(ConfigurationError, match="wait for 0 calls"):
        expect_calls(server.three, 0)
    with pytest.raises(ArgumentTypeError, match="that batched decorates"):
        expect_calls(server.seen_runs, 1)


def test_a_method_without_its_object_has_no_queue(group: Cluster) -> None:
    for ask in (lambda: batch_statistics(Server.three), lambda: expect_calls(Server.three, 2)):
        with pytest.raises(ArgumentTypeError, match=r"Server.three is a method.*also of="):
            ask()


def test_a_function_that_comes_with_each_call_is_warned_of(group: Cluster) -> None:
    """Its calls find no others; a class by value is there as long as its objects are."""

    @batched
    def lone(values: Tensor) -> Tensor:
        return torch.full((len(values),), len(values))

    class Local:
        @batched(largest=2, smallest=2, longest_wait=batched_functions.LIMIT_S)
        def pair(self, values: Tensor) -> Tensor:
            return torch.full((len(values),), len(values))

    log = rpc.remote("worker0", batched_functions.Log)
    assert log.rpc_sync().get_name() is None
    made = [rpc.rpc_async("worker0", lone, (torch.ones(1),)) for _ in range(3)]
    assert [each.wait().item() for each in made] == [1, 1, 1]
    local = rpc.remote("worker0", Local)
    pairs = [local.rpc_async().pair(torch.ones(1)) for _ in range(4)]
    assert [each.wait().item() for each in pairs] == [2] * 4
    (text,) = log.rpc_sync().end()
    assert "lone is batched, and its calls run one by one" in text


def test_results_that_stay_on_the_worker(group: Cluster) -> None:
    server = rpc.remote("worker0", Server)
    made = [server.remote().three(torch.tensor([float(each)])) for each in range(3)]
    assert [each.to_here().tolist() for each in made] == [[1.0], [2.0], [3.0]]


def test_calls_of_a_worker_to_itself(group: Cluster) -> None:
    made = [
        rpc.rpc_async("driver", batched_functions.plain, (torch.tensor([float(each)]),))
        for each in range(2)
    ]
    assert [each.wait().tolist() for each in made] == [[0.0], [10.0]]


def test_threads_of_the_worker_and_calls_within_calls(group: Cluster) -> None:
    server = rpc.remote("worker0", Server)
    server.rpc_sync().go_on()
    assert server.rpc_sync().calls_of_threads(10) == [float(each) for each in range(10)]
    within = [server.rpc_async().through(each) for each in range(8)]
    assert [each.wait() for each in within] == [float(each) for each in range(8)]


def test_a_function_and_its_time_limit(group: Cluster) -> None:
    assert rpc.rpc_sync("worker1", batched_functions.plain, (torch.tensor(1.0),)).item() == 10.0
    found = rpc.rpc_sync("worker1", batch_statistics, (batched_functions.plain,))
    assert found.sizes == {1: 1}
    assert found.longest_wait_s >= 0.01


# Errors


def test_a_call_that_cannot_be_stacked_fails_alone(group: Cluster) -> None:
    server = rpc.remote("worker0", Server)
    odd = rpc.rpc_async("worker1", batched_functions.call_and_wait, (server, [1.0, 2.0]))
    others = [server.rpc_async().three(torch.tensor([float(each)])) for each in range(2)]
    assert [each.wait().tolist() for each in others] == [[1.0], [2.0]]
    with pytest.raises(BatchError, match=r"worker 'worker1' cannot be stacked.*float32\[2\]") as e:
        odd.wait()
    assert e.value.callers == ("worker1",)
    assert e.value.shapes == ("float32[2]",)


def test_wrong_arguments_fail_alone_and_at_once(group: Cluster) -> None:
    server = rpc.remote("worker0", Server)
    with pytest.raises(TypeError, match="values"):
        server.rpc_sync().three()
    assert statistics_of(server, Server.three) == BatchStatistics()


def test_a_result_without_a_row_for_each_call(group: Cluster) -> None:
    server = rpc.remote("worker0", Server)
    made = [server.rpc_async().short(torch.ones(3)) for _ in range(2)]
    for each in made:
        error = raised_by(each.wait)
        assert isinstance(error, BatchError)
        assert "batch of 2 calls and returned a tensor of shape [1, 3]" in str(error)


def test_an_error_of_the_function_reaches_all_callers_of_the_batch(group: Cluster) -> None:
    server = rpc.remote("worker0", Server)
    made = [server.rpc_async().failing(torch.tensor(each)) for each in (1, 2)]
    for each in made:
        with pytest.raises(LookupError, match=r"no \[(1, 2|2, 1)\]") as caught:
            each.wait()
        if sys.version_info >= (3, 11):
            notes = "".join(caught.value.__notes__)
            assert "in a batch of 2 calls of Server.failing, by 'driver'" in notes
    assert statistics_of(server, Server.failing).failed == 2


def test_with_isolation_only_the_call_at_fault_fails(group: Cluster) -> None:
    server = rpc.remote("worker0", Server)
    values = [4.0, 9.0, -1.0, 16.0]
    made = [server.rpc_async().positive(torch.tensor(each)) for each in values]
    assert [made[place].wait().item() for place in (0, 1, 3)] == [2.0, 3.0, 4.0]
    assert isinstance(raised_by(made[2].wait), ValueError)
    # Calls under way at the same time come in any order: the error is in one of the halves.
    assert server.rpc_sync().seen_runs() in ([4, 2, 2, 1, 1], [4, 2, 1, 1, 2])


def test_too_many_waiting_calls_are_refused(group: Cluster) -> None:
    server = rpc.remote("worker0", Server)
    first = server.rpc_async().gated(torch.tensor(0.0))
    server.rpc_sync().await_run()
    waiting = [server.rpc_async().gated(torch.tensor(float(each))) for each in range(1, 5)]
    await_waiting(server, Server.gated, 4)
    with pytest.raises(QueueFull, match=r"4 calls of Server\.gated wait on worker 'worker0'"):
        server.rpc_sync().gated(torch.tensor(5.0))
    server.rpc_sync().go_on()
    assert [each.wait().item() for each in (first, *waiting)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert statistics_of(server, Server.gated).refused == 1


# Callers that no longer wait


def test_a_cancelled_call_leaves_the_batch(group: Cluster) -> None:
    server = rpc.remote("worker0", Server)
    cancelled = server.rpc_async().three(torch.tensor(7.0))
    await_waiting(server, Server.three, 1)
    assert cancelled.cancel()
    await_waiting(server, Server.three, 0)
    assert isinstance(raised_by(cancelled.wait), CallCancelled)
    made = [server.rpc_async().three(torch.tensor(float(each))) for each in range(3)]
    assert [each.wait().item() for each in made] == [1.0, 2.0, 3.0]
    found = statistics_of(server, Server.three)
    assert (found.left, found.sizes) == (1, {3: 1})


# Gradients


def expected(seed: int) -> tuple[Tensor, list[Tensor]]:
    leaf = torch.full((4,), 0.1 * seed, dtype=torch.float64, requires_grad=True)
    model = batched_functions.model()
    model((leaf * 2).sin()).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad, [each.grad for each in model.parameters() if each.grad is not None]


def check_weights(found: list[Tensor], *seeds: int) -> None:
    sums = [sum(each) for each in zip(*[expected(seed)[1] for seed in seeds], strict=True)]
    torch.testing.assert_close(found, sums, rtol=0, atol=1e-12)


def test_callers_in_contexts_of_their_own_share_a_batch(group: Cluster) -> None:
    server = rpc.remote("worker0", Server)
    plans = [("driver", 1, True), ("worker1", 2, True), ("worker1", 3, False), ("worker0", 4, True)]
    with ThreadPoolExecutor(4) as pool:
        passes = [
            pool.submit(
                rpc.rpc_sync,
                *(to, batched_functions.own_pass, (server, seed, requires_grad)),
            )
            for to, seed, requires_grad in plans
        ]
        for (_, seed, requires_grad), each in zip(plans, passes, strict=True):
            found = each.result()
            check_weights(found["weights"], seed)
            if requires_grad:
                torch.testing.assert_close(found["own"], expected(seed)[0], rtol=0, atol=1e-12)
            else:
                assert found["own"] is None
    assert server.rpc_sync().seen_runs() == [4]


def test_one_context_with_passes_through_some_of_its_calls(group: Cluster) -> None:
    server = rpc.remote("worker0", Server)
    leaves = [
        torch.full((4,), 0.1 * seed, dtype=torch.float64, requires_grad=True)
        for seed in range(1, 5)
    ]
    with autograd.context() as context_id:
        calls = [server.rpc_async().forward((leaf * 2).sin()) for leaf in leaves[:2]]
        calls += [server.rpc_async().forward((leaf.detach() * 2).sin()) for leaf in leaves[2:]]
        losses = [each.wait().square().sum() for each in calls]
        autograd.backward(context_id, [losses[0] + losses[2]])
        check_weights(batched_functions.weights_of(server, context_id), 1, 3)
        assert leaves[1] not in autograd.get_gradients(context_id)
        # The graph of the batch is still there for the others.
        autograd.backward(context_id, [losses[1] + losses[3]])
        check_weights(batched_functions.weights_of(server, context_id), 1, 2, 3, 4)
        found = autograd.get_gradients(context_id)
        for seed, leaf in enumerate(leaves[:2], 1):
            torch.testing.assert_close(found[leaf], expected(seed)[0], rtol=0, atol=1e-12)
    assert server.rpc_sync().seen_runs() == [4]


def test_outside_of_contexts_and_without_gradients(group: Cluster) -> None:
    server = rpc.remote("worker0", Server)
    leaf = torch.full((4,), 0.1, dtype=torch.float64, requires_grad=True)
    calls = [server.rpc_async().forward((leaf * 2).sin()) for _ in range(2)]
    with torch.no_grad():
        calls.append(server.rpc_async().forward((leaf * 2).sin()))
    calls.append(server.rpc_async().forward(torch.zeros(4, dtype=torch.float64)))
    used, _, plain, _ = (each.wait() for each in calls)
    assert not plain.requires_grad
    autograd.backward(used.square().sum())
    torch.testing.assert_close(leaf.grad, expected(1)[0], rtol=0, atol=1e-12)
    found = rpc.rpc_sync("worker0", batched_functions.local_gradients, (server,))
    check_weights([each for each in found if each is not None], 1)
    assert server.rpc_sync().seen_runs() == [4]
