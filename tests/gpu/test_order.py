"""A receiver sees the numbers that the sender's stream has yet to write.

Most tensors here are zeros, until a stream that is busy for some time writes other numbers. A CPU
has no streams, so these tests check values only there.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.gpu import functions
from tests.gpu.device import DEVICE, IS_GPU, keep_busy, only_gpu, synchronize
from tests.gpu.functions import BUSY_S, bounds, bounds_through, late
from torchweft import autograd, rpc
from torchweft.launch import Cluster

COUNTS = [2, 1 << 12, 1 << 18, 1 << 23]
"""Numbers of the tensors: in the message, small, medium, and large."""
each_size = pytest.mark.parametrize("count", COUNTS)
values = itertools.count(1)


@pytest.fixture(autouse=True)
def _forgotten(group: Cluster) -> Iterator[None]:
    yield
    for name in group.names:
        rpc.rpc_sync(name, functions.forget)


def value() -> float:
    """Returns a number that no memory holds yet."""
    return float(next(values))


def on_another_stream() -> contextlib.AbstractContextManager[object]:
    if IS_GPU:
        return torch.cuda.stream(torch.cuda.Stream(DEVICE))  # type: ignore[no-untyped-call]
    return contextlib.nullcontext()


# Tensors of messages


@each_size
def test_an_argument(group: Cluster, count: int) -> None:
    number = value()
    assert rpc.rpc_sync("worker0", bounds, (late(number, count),)) == [number, number]


@each_size
def test_an_argument_made_on_another_stream(group: Cluster, count: int) -> None:
    number = value()
    with on_another_stream():
        assert rpc.rpc_sync("worker0", bounds, (late(number, count),)) == [number, number]


@each_size
def test_a_result(group: Cluster, count: int) -> None:
    number = value()
    assert bounds(rpc.rpc_sync("worker0", late, (number, count))) == [number, number]
    assert rpc.rpc_sync("worker0", bounds_through, ("worker1", late, number + 0.5, count)) == [
        number + 0.5,
        number + 0.5,
    ]


@each_size
def test_an_awaited_result(group: Cluster, count: int) -> None:
    number = value()
    arguments = ("worker1", late, number, count)
    assert rpc.rpc_sync("worker0", functions.bounds_awaited, arguments) == [number, number]


@each_size
def test_a_result_used_on_another_stream(group: Cluster, count: int) -> None:
    calls = [(number := value(), rpc.rpc_async("worker0", late, (number, count))) for _ in range(3)]
    for number, call in calls:
        with on_another_stream():
            assert bounds(call.wait()) == [number, number]
    number = value()
    chained = rpc.rpc_async("worker0", late, (number, count)).then(lambda it: bounds(it.wait()))
    assert chained.wait() == [number, number]


@each_size
def test_a_value_behind_a_reference(group: Cluster, count: int) -> None:
    number = value()
    reference = rpc.remote("worker0", late, (number, count))
    assert rpc.rpc_sync("worker0", bounds, (reference,)) == [number, number]
    assert rpc.rpc_sync("worker1", bounds, (reference,)) == [number, number]
    assert bounds(reference.to_here()) == [number, number]


@each_size
def test_a_value_behind_a_reference_fetched_at_once(group: Cluster, count: int) -> None:
    number = value()
    assert bounds(rpc.remote("worker0", late, (number, count)).to_here()) == [number, number]
    reference = rpc.remote("worker0", late, (number + 0.5, count))
    assert rpc.rpc_sync("worker1", bounds, (reference,)) == [number + 0.5, number + 0.5]


@each_size
def test_a_value_that_another_worker_made_is_read_in_its_owners_main_thread(
    group: Cluster, count: int
) -> None:
    number = value()
    made = rpc.rpc_sync("worker0", functions.remote_on, ("driver", late, number, count))
    assert bounds(made.local_value()) == [number, number]
    with on_another_stream():
        assert bounds(made.local_value()) == [number, number]


def test_an_argument_that_an_owner_has_just_made(group: Cluster) -> None:
    """The argument is made on a stream of a call, and sent on by the next call."""
    for count in COUNTS:
        number = value()
        rpc.rpc_sync("worker0", functions.late_kept, ("made", number, count))
        assert bounds(rpc.rpc_sync("worker0", functions.kept, ("made",))) == [number, number]


# Memory that is written again


@each_size
def test_what_the_sender_writes_after_the_call_never_arrives(group: Cluster, count: int) -> None:
    number = value()
    sent = torch.full((count,), number, device=DEVICE)
    for turn in range(8):
        name = f"sent {turn}"
        rpc.rpc_sync("worker0", functions.keep, (name, sent.fill_(number + turn)))
    sent.fill_(-1)
    synchronize()
    for turn in range(8):
        found = rpc.rpc_sync("worker0", functions.kept_bounds, (f"sent {turn}",))
        assert found == [number + turn, number + turn]


@each_size
def test_memory_that_the_sender_uses_again_is_not_seen(group: Cluster, count: int) -> None:
    """The sender drops each tensor, and its allocator gives the same memory out again."""
    for turn in range(16):
        tensor = torch.full((count,), float(turn), device=DEVICE)
        rpc.rpc_sync("worker0", functions.keep, (f"sent {turn}", tensor))
        del tensor
    for turn in range(16):
        found = rpc.rpc_sync("worker0", functions.kept_bounds, (f"sent {turn}",))
        assert found == [turn, turn]


@each_size
def test_memory_that_the_receiver_drops_while_it_is_used_stays(group: Cluster, count: int) -> None:
    """Work on a received tensor is pending when it is dropped, and the next ones arrive."""
    sums = []
    for turn in range(8):
        received = rpc.rpc_sync("worker0", torch.full, ((count,), float(turn)), {"device": DEVICE})
        keep_busy(BUSY_S / 5)
        sums.append(received * 1)
        del received
    assert [bounds(each) for each in sums] == [[turn, turn] for turn in range(8)]


# Calls


@each_size
def test_calls_that_follow_one_another_change_a_state_in_order(group: Cluster, count: int) -> None:
    state = rpc.remote("worker0", functions.State, (count,))
    wanted = 0.0
    for turn in range(8):
        state.rpc_sync().add(turn)
        doubled = state.rpc_sync().double()
        wanted = 2 * (wanted + turn)
        assert bounds(doubled) == [wanted, wanted]
    assert state.rpc_sync().read() == [wanted, wanted]


def test_calls_of_several_callers_change_a_state_in_order(group: Cluster) -> None:
    state = rpc.remote("worker0", functions.State, (1 << 20,))
    wanted = 0.0
    for turn in range(6):
        rpc.rpc_sync(("worker1", "worker2", "driver")[turn % 3], add_to, (state, turn))
        state.rpc_sync().double()
        wanted = 2 * (wanted + turn)
    assert state.rpc_sync().read() == [wanted, wanted]


def add_to(state: rpc.RRef[functions.State], amount: float) -> None:
    state.rpc_sync().add(amount)


@only_gpu
def test_a_call_runs_on_a_stream_of_its_own(group: Cluster) -> None:
    streams = [rpc.rpc_sync("worker0", functions.stream_here) for _ in range(10)]
    assert rpc.rpc_sync("worker0", functions.default_stream_here) not in streams
    assert len(set(streams)) == 1, "calls that follow one another share a stream"


@only_gpu
def test_calls_at_the_same_time_have_different_streams(group: Cluster) -> None:
    calls = [rpc.rpc_async("worker0", functions.stream_of_two) for _ in range(2)]
    first, second = torch.futures.wait_all(calls)
    assert first != second


@only_gpu
def test_a_call_leaves_the_callers_stream_as_it_is(group: Cluster) -> None:
    before = functions.stream_here()
    rpc.rpc_sync("worker0", late, (value(), 1 << 18))
    rpc.rpc_sync("driver", functions.stream_here)
    assert functions.stream_here() == before
    with on_another_stream():
        inner = functions.stream_here()
        rpc.rpc_sync("worker0", late, (value(), 1 << 18))
        assert functions.stream_here() == inner != before


# Gradients


class LateGradient(torch.autograd.Function):
    """The identity; its gradient is written by a busy stream."""

    @staticmethod
    def forward(ctx: functions.Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: functions.Any, gradient: Tensor) -> Tensor:
        made = torch.zeros_like(gradient)
        keep_busy(BUSY_S)
        return made.copy_(gradient)


def passed(tensor: Tensor) -> Tensor:
    result: Tensor = LateGradient.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def scaled(tensor: Tensor, weight: rpc.RRef[Tensor]) -> Tensor:
    return passed(tensor * passed(weight.local_value()))


def weight(count: int, number: float) -> Tensor:
    return torch.full((count,), number, device=DEVICE, requires_grad=True)


def gradient_bounds(context_id: int, leaf: rpc.RRef[Tensor]) -> list[float]:
    return bounds(autograd.get_gradients(context_id)[leaf.local_value()])


def grad_bounds(leaf: rpc.RRef[Tensor]) -> list[float]:
    found = leaf.local_value().grad
    assert found is not None
    return bounds(found)


@each_size
def test_gradients_in_a_context(group: Cluster, count: int) -> None:
    number = value()
    start, there = weight(count, number), rpc.remote("worker0", weight, (count, number + 1))
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker0", scaled, (passed(start), there))
        autograd.backward(context_id, [passed(result).sum()])
        assert bounds(autograd.get_gradients(context_id)[start]) == [number + 1, number + 1]
        found = rpc.rpc_sync("worker0", gradient_bounds, (context_id, there))
        assert found == [number, number]


@each_size
def test_gradients_outside_of_contexts(group: Cluster, count: int) -> None:
    number = value()
    start, there = weight(count, number), rpc.remote("worker0", weight, (count, number + 1))
    autograd.backward(passed(rpc.rpc_sync("worker0", scaled, (passed(start), there))).sum())
    assert start.grad is not None
    assert bounds(start.grad) == [number + 1, number + 1]
    assert rpc.rpc_sync("worker0", grad_bounds, (there,)) == [number, number]
