"""Maps over real workers: results, shared arguments, gradients, scheduling and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes import functions
from tests.contract.processes import mapreduce_functions_m as parts
from tests.contract.processes.mapreduce_gradients import (
    map_and_check,
    model_and_inputs,
    on,
    single_gradients,
)
from torchweft import mapreduce, rpc
from torchweft.errors import CallCancelled, CallTimeout, SerializationError
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
WORKERS = ("worker0", "worker1")
LIMIT_S = 20.0

each_alone = mapreduce.dim_partitioner(0, exclusive=True, keepdim=False)
each_on_workers = mapreduce.dim_partitioner(0, exclusive=True, keepdim=False, workers=WORKERS)


# Results


def test_results_come_in_the_order_of_the_parts(group: Cluster) -> None:
    found = mapreduce.remote_sync_call(
        parts.double, args=(torch.arange(11),), partitioner=each_alone
    )
    assert [int(each) for each in found] == list(range(0, 22, 2))
    where = mapreduce.remote_sync_call(parts.where, args=(torch.arange(5),), partitioner=each_alone)
    assert where == ["driver", "worker0", "worker1", "driver", "worker0"]


@pytest.mark.parametrize("worker", ["worker1", 1, 0])
def test_one_worker_gives_a_list_of_one(group: Cluster, worker: str | int) -> None:
    found = mapreduce.remote_sync_call(parts.where, args=(torch.ones(4),), partitioner=worker)
    assert found == [rpc.get_worker_info(worker).name]


def test_two_triples_of_a_function(group: Cluster) -> None:
    def cut(value: Tensor, by: int) -> list[tuple[Any, Any, Any]]:
        return [("worker1", (value, by), None), (0, (value,), {"second": by + 1})]

    found = mapreduce.remote_sync_call(
        functions.add, args=(torch.ones(2),), kwargs={"by": 1}, partitioner=cut
    )
    assert [each.tolist() for each in found] == [[2.0, 2.0], [3.0, 3.0]]


def test_futures_go_on_and_can_be_awaited(group: Cluster) -> None:
    future = parts.sum_later(torch.arange(10.0))
    assert isinstance(future, torch.futures.Future)
    assert future.then(lambda done: done.wait() + 1).wait() == 46
    assert rpc.rpc_sync("worker0", awaited_sum, args=(torch.arange(10.0),)) == 45


async def awaited_sum(value: Tensor) -> float:
    return float(await parts.sum_later(value))


@pytest.mark.parametrize("function", [parts.soon, parts.later])
@pytest.mark.parametrize("partitioner", [each_alone, "worker0", 0])
def test_functions_that_are_not_done_when_they_return(
    group: Cluster, function: Any, partitioner: Any
) -> None:
    found = mapreduce.remote_sync_call(
        function, args=(torch.ones(()).expand(4).clone(),), partitioner=partitioner
    )
    for each in found:
        assert (each == 2).all()


def test_decorated_functions_and_methods(group: Cluster) -> None:
    model, inputs = model_and_inputs(6)
    expected = parts.loss(model, inputs)
    torch.testing.assert_close(parts.mean_of_squares(model, inputs), expected)
    assert parts.Scaled(0.5).total(torch.arange(10.0)) == 22.5
    offset = torch.ones(())

    @mapreduce.parallelize(mapreduce.batch_partitioner, sum)
    def shifted(value: Tensor) -> Tensor:
        return (value + offset).sum()

    assert shifted(torch.arange(10.0)) == 55


def test_maps_within_parts_of_maps_with_two_threads(group: Cluster) -> None:
    total = mapreduce.remote_sync_call(
        parts.map_on, args=(torch.arange(32.0), 3), partitioner=each_two, reducer=sum
    )
    assert total == 496


def each_two(value: Tensor, depth: int) -> list[tuple[Any, Any, Any]]:
    rows = value.split(2)
    return [(place % 3, (row, depth), {}) for place, row in enumerate(rows)] + [
        (place, (torch.zeros(8), depth), {}) for place in range(3)
    ]


# Arguments that parts share


class Large(nn.Module):
    """A module of 640 kB, in tensors that travel over the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.zeros(10_000) for _ in range(16))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.sum() + sum(row.sum() for row in self.rows)


def bytes_sent_by(action: Callable[[], Any]) -> int:
    before = rpc.traffic().bytes_sent
    action()
    return rpc.traffic().bytes_sent - before


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_module_travels_once_to_each_worker(group: Cluster, is_recorded: bool) -> None:
    model, inputs = Large(), torch.zeros(8, 3)

    def step() -> None:
        loss = mapreduce.remote_sync_call(
            parts.loss, args=(model, inputs), partitioner=on(*WORKERS), reducer=sum
        )
        if is_recorded:
            torchweft.autograd.backward(context_id, [loss])

    with torchweft.autograd.context() as context_id:
        step() if is_recorded else None
    size = sum(each.nbytes for each in model.parameters())
    with torchweft.autograd.context() as context_id, torch.set_grad_enabled(is_recorded):
        sent = bytes_sent_by(step)
    assert 2 * size < sent < 2 * size * 1.05


def test_a_list_that_all_parts_hold_is_one_thing(group: Cluster) -> None:
    model, inputs = model_and_inputs()

    def cut(inputs: Tensor) -> list[tuple[Any, Any, Any]]:
        others = list(model.parameters())
        return [(place % 3, (model, others, row), {}) for place, row in enumerate(inputs)]

    with torchweft.autograd.context() as context_id:
        losses = mapreduce.remote_sync_call(parts.loss_with, args=(inputs,), partitioner=cut)
        torchweft.autograd.backward(context_id, [torch.stack(losses).mean()])
        found = torchweft.autograd.get_gradients(context_id)
    parameters = list(model.parameters())
    expected = single_gradients(model, [parts.loss_with(model, parameters, row) for row in inputs])
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("rows", [2, 7])
def test_no_part_sees_what_another_one_did_to_its_copy(
    group: Cluster, rows: int, is_recorded: bool
) -> None:
    model, inputs = model_and_inputs(rows)
    expected = [parts.loss(model, row).item() for row in inputs.split(1)]
    before = inputs.clone()
    with torchweft.autograd.context(), torch.set_grad_enabled(is_recorded):
        found = mapreduce.remote_sync_call(
            parts.spoil, args=(model, inputs), partitioner=on("driver", "worker0")
        )
    assert found == pytest.approx(expected)
    assert torch.equal(inputs, before)
    assert parts.spoil(model, inputs[:1]) == pytest.approx(expected[0])


def test_references_in_what_parts_have_in_common(group: Cluster) -> None:
    reference = rpc.remote("worker1", functions.identity, args=(5.0,))
    common = {"reference": reference, "tensor": torch.ones(3)}

    def cut(value: Tensor) -> list[tuple[Any, Any, Any]]:
        return [(place % 3, (common, row), {}) for place, row in enumerate(value)]

    found = mapreduce.remote_sync_call(use_reference, args=(torch.arange(6.0),), partitioner=cut)
    assert found == [8.0 + row for row in range(6)]


def use_reference(common: dict[str, Any], row: Tensor) -> float:
    total: float = common["reference"].to_here() + common["tensor"].sum().item() + row.item()
    return total


def test_what_cannot_travel(group: Cluster) -> None:
    with pytest.raises(SerializationError, match="lock"):
        mapreduce.remote_sync_call(
            functions.collect,
            args=(functions.make_lock(), torch.zeros(8)),
            partitioner=on(*WORKERS),
        )


# Gradients


@pytest.mark.parametrize("names", [("worker0",), WORKERS, ("driver", *WORKERS), ("driver",)])
def test_gradients_are_those_of_a_single_process(group: Cluster, names: tuple[str, ...]) -> None:
    map_and_check(parts.loss, partitioner=on(*names))


def test_no_gradients_are_recorded_where_none_are_wanted(group: Cluster) -> None:
    model, inputs = model_and_inputs()
    with torchweft.autograd.context() as context_id, torch.no_grad():
        found = mapreduce.remote_sync_call(
            parts.loss, args=(model, inputs), partitioner=on(*WORKERS), reducer=torch.stack
        )
        assert not found.requires_grad
        assert not torchweft.autograd.get_gradients(context_id)


# Scheduling


def test_who_has_nothing_to_do_takes_what_waits(group: Cluster) -> None:
    def cut(value: Tensor, gate: str) -> list[tuple[Any, Any, Any]]:
        return [("worker0" if int(row) < 7 else "worker1", (row, gate), {}) for row in value]

    found = mapreduce.remote_sync_call(
        parts.wait_for_the_others,
        args=(torch.arange(8), "balance"),
        partitioner=cut,
        balance=True,
        timeout=LIMIT_S,
    )
    parts.take_notes()
    assert found == ["worker0"] + ["worker1"] * 7


def test_several_parts_at_a_time(group: Cluster) -> None:
    found = mapreduce.remote_sync_call(
        functions.meet,
        args=("concurrency", torch.tensor([3, 3, 3])),
        partitioner=mapreduce.dim_partitioner(
            0, exclusive=True, keepdim=False, workers=["worker0"]
        ),
        concurrency=3,
        timeout=LIMIT_S,
    )
    assert found == [3, 3, 3]


# Errors


@pytest.mark.parametrize("rows", [2, 8])
def test_the_error_of_a_part_says_which_one(group: Cluster, rows: int) -> None:
    with pytest.raises(KeyError, match="no part 1") as caught:
        mapreduce.remote_sync_call(
            parts.fail_at, args=(torch.arange(rows), 1), partitioner=each_on_workers
        )
    *_, note = caught.value.__notes__
    assert f"part 1 of {rows}" in note
    assert "fail_at" in note
    assert "'worker1'" in note


def test_the_other_parts_are_cancelled(group: Cluster) -> None:
    with pytest.raises(KeyError, match="part 0"):
        mapreduce.remote_sync_call(
            parts.fail_or_wait,
            args=(torch.arange(4), "begun"),
            partitioner=each_on_workers,
            timeout=LIMIT_S,
        )
    rpc.rpc_sync("driver", functions.pass_gate, args=("begun cancelled",))


@pytest.mark.parametrize("rows", [2, 8])
def test_a_timeout_is_for_the_whole_map(group: Cluster, rows: int) -> None:
    gate = f"never {rows}"
    with pytest.raises(CallTimeout) as caught:
        mapreduce.remote_sync_call(
            parts.hold,
            args=(torch.arange(rows), gate),
            partitioner=each_on_workers,
            timeout=0.2,
        )
    assert "hold" in caught.value.__notes__[-1]
    functions.open_gate(gate)


def test_cancelling_a_map(group: Cluster) -> None:
    future: Any = mapreduce.remote_async_call(
        parts.hold, args=(torch.arange(8), "held"), partitioner=each_on_workers
    )
    assert not future.done()
    assert future.cancel()
    with pytest.raises(CallCancelled):
        future.wait()
    assert not future.cancel()
    functions.open_gate("held")


def test_a_reducer_that_fails(group: Cluster) -> None:
    with pytest.raises(torchweft.errors.ReduceError) as caught:
        mapreduce.remote_sync_call(parts.where, args=(torch.ones(4),), reducer=torch.stack)
    assert isinstance(caught.value.__cause__, TypeError)


def test_nothing_is_left_of_maps_whose_reducer_fails(group: Cluster) -> None:
    """Frames in the error must keep no references; the fixture checks for references."""

    def picky(results: list[torch.Tensor]) -> None:
        raise ValueError(f"not {len(results)} results")

    for _ in range(20):
        with pytest.raises(torchweft.errors.ReduceError) as caught:
            mapreduce.remote_sync_call(parts.where, args=(torch.ones(4),), reducer=picky)
        (note,) = caught.value.__cause__.__notes__  # type: ignore[union-attr]
        assert "in picky" in note
