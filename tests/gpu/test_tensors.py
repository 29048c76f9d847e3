"""Tensors on a GPU arrive bit for bit, on the right device, and are the receiver's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.gpu import functions
from tests.gpu.device import DEVICE, only_gpu, synchronize
from tests.gpu.functions import CASES, bounds, compared, differences, made, numbers
from tests.gpu.members import Members
from torchweft import rpc
from torchweft.launch import Cluster


@pytest.fixture(autouse=True)
def _forgotten(group: Cluster) -> Iterator[None]:
    yield
    for name in group.names:
        rpc.rpc_sync(name, functions.forget)


def assert_same(found: list[str]) -> None:
    assert not found, "\n".join(found)


def test_as_an_argument(group: Cluster) -> None:
    for name in CASES:
        assert_same(rpc.rpc_sync("worker0", differences, (name, made(name))))


def test_as_a_result(group: Cluster) -> None:
    for name in CASES:
        with torch.no_grad():
            assert_same(differences(name, rpc.rpc_sync("worker0", made, (name,))))
            assert_same(
                differences(name, rpc.rpc_async("worker0", functions.made_soon, (name,)).wait())
            )


def test_as_a_result_of_calls_in_flight(group: Cluster) -> None:
    with torch.no_grad():
        calls = {name: rpc.rpc_async("worker0", made, (name,)) for name in CASES}
        chained = {
            name: rpc.rpc_async("worker1", made, (name,)).then(
                lambda done, name=name: differences(name, done.wait())  # type: ignore[misc]
            )
            for name in CASES
        }
        for name, call in calls.items():
            assert_same(differences(name, call.wait()))
            assert_same(chained[name].wait())


def test_as_a_result_that_is_awaited(group: Cluster) -> None:
    async def gather() -> list[str]:
        awaited = {name: await rpc.rpc_async("worker0", made, (name,)) for name in CASES}
        return [text for name, tensor in awaited.items() for text in differences(name, tensor)]

    with torch.no_grad():
        assert_same(asyncio.run(gather()))
        for name in CASES:
            there = rpc.rpc_sync("worker0", functions.awaited_differences, (name, "worker1"))
            assert_same(there)


def test_behind_a_reference(group: Cluster) -> None:
    with torch.no_grad():
        for name in CASES:
            reference = rpc.remote("worker0", made, (name,))
            fetch = (name, reference)
            assert_same(rpc.rpc_sync("worker1", functions.fetched_differences, fetch))
            assert_same(rpc.rpc_sync("worker0", functions.fetched_differences, fetch))
            assert_same(differences(name, reference.to_here()))
            del reference, fetch


def test_there_and_back_and_to_oneself(group: Cluster) -> None:
    with torch.no_grad():
        for name in CASES:
            for to in ("worker0", "driver"):
                assert_same(differences(name, rpc.rpc_sync(to, functions.echo, (made(name),))))


def test_all_in_one_message(group: Cluster) -> None:
    with torch.no_grad():
        arrived = rpc.rpc_sync("worker0", functions.echo, (functions.all_made(),))
    assert list(arrived) == list(CASES)
    for name, tensor in arrived.items():
        assert_same(differences(name, tensor))


def test_three_hundred_in_one_message(group: Cluster) -> None:
    sent = functions.many(300)
    assert_same(rpc.rpc_sync("worker0", functions.many_differences, (sent,)))
    assert_same(functions.many_differences(rpc.rpc_sync("worker0", functions.many, (300,))))


def test_in_dataclasses_modules_and_their_states(group: Cluster) -> None:
    batch, module = functions.batch(), functions.module()
    assert_same(rpc.rpc_sync("worker0", functions.batch_differences, (batch,)))
    assert_same(functions.batch_differences(rpc.rpc_sync("worker0", functions.batch)))
    assert_same(rpc.rpc_sync("worker0", functions.module_differences, (module,)))
    assert_same(functions.module_differences(rpc.rpc_sync("worker0", functions.module)))
    state = rpc.rpc_sync("worker0", functions.echo, (module.state_dict(),))
    assert_same(functions.state_differences(state))


def test_beside_tensors_on_the_cpu_and_other_values(group: Cluster) -> None:
    given = {"gpu": [numbers(9), numbers(1 << 17)], "cpu": (torch.arange(5.0), torch.ones(1 << 17))}
    given["both"] = (given["gpu"][0], given["cpu"][0], "text", 3)  # type: ignore[assignment]
    arrived = rpc.rpc_sync("worker0", functions.echo, (given,))
    for name in ("gpu", "cpu"):
        for actual, wanted in zip(arrived[name], given[name], strict=True):
            assert_same(compared(name, actual, wanted))
    assert arrived["both"][0] is arrived["gpu"][0]
    assert arrived["both"][2:] == ("text", 3)


def test_views_of_one_storage_stay_views(group: Cluster) -> None:
    for count in (6, 1 << 20):
        base = torch.zeros(2, count, device=DEVICE)
        call = (base, base[1])
        assert rpc.rpc_sync("worker0", functions.changed_together, call) == [-7, 0]
        assert bounds(base) == [0, 0]
        whole, row = rpc.rpc_sync("worker0", functions.echo, (call,))
        assert functions.changed_together(whole, row) == [-7, 0]
        first, second = rpc.rpc_sync("worker0", functions.echo, ((base, base),))
        assert first is second


@pytest.mark.parametrize("count", [2, 1 << 14, 1 << 18, 1 << 23])
def test_what_arrives_is_the_receivers_own(group: Cluster, count: int) -> None:
    sent = torch.ones(count, device=DEVICE)
    assert rpc.rpc_sync("worker0", functions.filled, (sent, 5.0)) == [5, 5]
    assert bounds(sent) == [1, 1]
    rpc.rpc_sync("worker0", functions.keep, ("sent", sent))
    sent.fill_(3)
    synchronize()
    assert rpc.rpc_sync("worker0", functions.kept_bounds, ("sent",)) == [1, 1]
    result = rpc.rpc_sync("worker0", functions.kept, ("sent",))
    rpc.rpc_sync("worker0", functions.fill_kept, ("sent", 9.0))
    assert bounds(result) == [1, 1]
    result.fill_(4)
    synchronize()
    assert rpc.rpc_sync("worker0", functions.kept_bounds, ("sent",)) == [9, 9]


def test_it_stays_when_its_sender_drops_it_and_allocates_anew(group: Cluster) -> None:
    for count in (1 << 10, 1 << 18, 1 << 22):
        results = [
            rpc.rpc_sync("worker0", torch.full, ((count,), float(number)), {"device": DEVICE})
            for number in range(20)
        ]
        assert [bounds(result) for result in results] == [[n, n] for n in range(20)]


def test_the_values_of_a_generator(group: Cluster) -> None:
    arrived = list(rpc.stream("worker0", functions.slices_late, (8,)))
    assert [bounds(tensor) for tensor in arrived] == [[n, n] for n in range(1, 9)]
    assert {tensor.device for tensor in arrived} == {DEVICE}


def test_a_parameter_keeps_its_class_and_its_flag(group: Cluster) -> None:
    for requires_grad in (True, False):
        sent = nn.Parameter(numbers(4), requires_grad=requires_grad)
        with torch.no_grad():
            arrived = rpc.rpc_sync("worker0", functions.echo, (sent,))
        assert type(arrived) is nn.Parameter
        assert arrived.requires_grad == requires_grad
        assert arrived.device == DEVICE


def on_the_cpu(count: int) -> torch.Tensor:
    return torch.ones(count)


@only_gpu
def test_calls_without_gpu_tensors_initialise_no_cuda(members: Members) -> None:
    members.join("first", "second")
    sent = ("second", functions.bounds, on_the_cpu, 1 << 20)
    assert members.do("first", functions.call_with, *sent) == [1, 1]
    for name in ("first", "second"):
        assert not members.do(name, functions.is_cuda_initialised)
