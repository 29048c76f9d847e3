from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.unit.mapreduce import lone_worker
from torchweft import mapreduce, rpc
from torchweft.autograd.graph import place_of
from torchweft.engine.worker.current import current
from torchweft.errors import CallCancelled, NotInitialized, ReduceError
from torchweft.mapreduce import shared
from torchweft.mapreduce.execution import MapFuture, run_map
from torchweft.mapreduce.partitioners import Cut, Part
from torchweft.mapreduce.plan import Manner, Plan
from torchweft.rpc.worker import current_worker

LIMIT_S = 20.0
MANNER = Manner(-1.0, balance=False, rerun=None, concurrency=1)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with lone_worker.joined():
        yield


def cut_of(*args: tuple[Any, ...], is_any: bool = True) -> Cut:
    parts = [Part(0, each, {}, weight=float(place + 1)) for place, each in enumerate(args)]
    return Cut(parts, (0,), is_any)


def run(function: Any, cut: Cut, reducer: Any) -> MapFuture[Any]:
    return run_map(Plan(function, cut, MANNER), reducer)


def add(first: Any, second: Any) -> Any:
    return first + second


def spoil(model: nn.Module) -> Tensor:
    total = sum(each.sum() for each in model.parameters())
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    assert isinstance(total, Tensor)
    return total


# Results


def test_the_results_reduced_or_not() -> None:
    cut = cut_of((1, 2), (3, 4))
    assert run(add, cut, None).wait() == [3, 7]
    assert run(add, cut, sum).wait() == 10
    weighted: Any = run(add, cut, lambda results, weights: (results, weights))
    assert weighted.wait() == ([3, 7], [1.0, 2.0])


def test_no_parts() -> None:
    assert run(add, Cut([], (0,), is_any=True), None).wait() == []


def test_a_program_may_change_the_list_that_it_gets() -> None:
    with torchweft.autograd.context() as context_id:
        weight = torch.ones(2, requires_grad=True)
        future = run(add, cut_of((weight, 1), (weight, 2)), None)
        future.wait().clear()
        (held,) = contexts().get(context_id).recomputable
        held.compute_again()


@pytest.mark.parametrize("count", [1, 3])
def test_each_part_has_a_copy_of_its_own(count: int) -> None:
    model = nn.Linear(2, 2)
    expected = sum(each.sum().item() for each in model.parameters())
    results = run(spoil, cut_of(*[(model,)] * count), None).wait()
    assert [each.item() for each in results] == pytest.approx([expected] * count)


def test_gradients_lead_to_what_the_parts_have_in_common() -> None:
    weight = nn.Parameter(torch.ones(2))
    with torchweft.autograd.context() as context_id:
        total = run(add, cut_of((weight, 1), (weight, 2)), sum).wait()
        torchweft.autograd.backward(context_id, [total.sum()])
        assert torchweft.autograd.get_gradients(context_id)[weight].tolist() == [2, 2]


# Errors


def test_a_reducer_that_raises() -> None:
    with pytest.raises(ReduceError):
        run(add, cut_of((1, 2)), lambda results: results.missing).wait()

    def leave(results: list[Any]) -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        run(add, cut_of((1, 2)), leave).wait()


def test_a_future_that_the_program_has_completed_itself() -> None:
    gate = Gate()
    future = run(gate.run, cut_of((1,)), None)
    future.set_result("other")
    gate.opened.set()
    assert future.wait() == "other"


# Endings during a map


class Gate:
    """Makes parts wait."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.opened = threading.Event()
        self.run: Any = _Waiting(self)


gates: dict[int, Gate] = {}


class _Waiting:
    def __init__(self, gate: Gate) -> None:
        self._number = len(gates)
        gates[self._number] = gate

    def __call__(self, value: Any) -> Any:
        gate = gates[self._number]
        gate.begun.set()
        assert gate.opened.wait(LIMIT_S)
        return value


def test_a_context_that_ends_while_its_map_runs() -> None:
    gate, weight = Gate(), torch.ones(2, requires_grad=True)
    with torchweft.autograd.context():
        future = run(gate.run, cut_of((weight,), (weight,)), None)
        assert gate.begun.wait(LIMIT_S)
    gate.opened.set()
    assert [each.tolist() for each in future.wait()] == [[1, 1], [1, 1]]


async def never(value: Any) -> None:
    await asyncio.get_running_loop().create_future()


def test_a_worker_that_shuts_down_while_somebody_waits_for_a_map() -> None:
    future = run(never, cut_of((1,), (2,)), None)
    reactor = current().reactor
    has_waiter, begin_wait = threading.Event(), reactor.begin_wait

    def note_waiter() -> bool:
        has_waiter.set()
        return begin_wait()

    reactor.begin_wait = note_waiter  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(future.wait)
        assert has_waiter.wait(LIMIT_S)
        rpc.shutdown(graceful=False)
        error = waiting.exception(LIMIT_S)
    assert isinstance(error, (NotInitialized, CallCancelled))


def test_a_map_after_the_worker_has_shut_down() -> None:
    plan = Plan(add, cut_of((1, 2)), MANNER)
    rpc.shutdown(graceful=False)
    with pytest.raises(NotInitialized):
        run_map(plan, None).wait()
    with pytest.raises(NotInitialized):
        mapreduce.remote_sync_call(add, args=(1, 2), partitioner=0)


# Running again


def contexts() -> Any:
    return current_worker().contexts


def test_running_it_again_in_its_context() -> None:
    weight = torch.ones(2, requires_grad=True)
    with torchweft.autograd.context() as context_id:
        first = run(add, cut_of((weight, 1), (weight, 2)), None).wait()
        (held,) = contexts().get(context_id).recomputable
        with torch.no_grad():
            held.compute_again()
        again = held.replaced
        assert [again[place_of(each)].tolist() for each in first] == [[2, 2], [3, 3]]
        assert not again.keys() & {place_of(each) for each in again.values()}


@pytest.mark.parametrize("is_recorded", [False, True])
def test_only_what_gradients_lead_into_is_kept(is_recorded: bool) -> None:
    weight = torch.ones(2, requires_grad=is_recorded)
    with torchweft.autograd.context() as context_id:
        run(add, cut_of((weight, 1)), None).wait()
        with torch.no_grad():
            run(add, cut_of((weight, 1)), None).wait()
        assert len(contexts().get(context_id).recomputable) == is_recorded
    run(add, cut_of((weight, 1)), None).wait()


def test_an_interrupt_while_it_runs_again_leaves_no_call_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.ones(2, requires_grad=True)
    with torchweft.autograd.context() as context_id:
        run(add, cut_of((weight, 1)), None).wait()
        (held,) = contexts().get(context_id).recomputable

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(MapFuture, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            held.compute_again()
    assert len(current().calls) == 0


# Sent content


def plan_of(function: Any, cut: Cut, **manner: Any) -> Plan:
    return Plan(function, cut, MANNER._replace(**manner))


def test_parts_of_a_worker_share_what_they_have_in_common() -> None:
    tensor = torch.ones(3)
    plan = plan_of(add, cut_of((tensor, 1), (tensor, 2)))
    assert plan.content is plan.own_content is not None
    assert len(plan.content.tensors) == 1
    assert [args[1] for args, _ in plan.arguments] == [1, 2]
    assert all(type(args[0]) is shared.Slot for args, _ in plan.arguments)


def test_what_saves_nothing_is_not_made() -> None:
    tensor = torch.ones(3)
    assert plan_of(add, cut_of((1, 1))).content is None, "nothing in common"
    single = plan_of(add, cut_of((tensor, 1)))
    assert single.content is None
    assert single.own_content is not None, "this worker has its own copies by it"
    assert single.own_content.tensors == []


def test_who_runs_several_parts_can_keep_one_ahead() -> None:
    me: Any = SimpleNamespace(is_self=False)
    plan = plan_of(add, cut_of((1, 1), (1, 2)))
    assert plan.content is not None, "though there is nothing in common"
    assert plan.keeps_ahead(me)
    assert not plan_of(add, cut_of((1, 1))).keeps_ahead(me)


def test_what_returns_before_its_work_is_done_is_not_kept_ahead() -> None:
    async def later(first: Any, second: Any) -> Any:
        return first + second

    me: Any = SimpleNamespace(is_self=False)
    for function in (later, rpc.functions.async_execution(add)):
        assert not plan_of(function, cut_of((1, 1), (1, 2))).keeps_ahead(me)


def test_references_go_along_with_each_part() -> None:
    held = [rpc.remote("worker0", add, args=(1, 2)), torch.ones(3)]
    plan = plan_of(len, cut_of((held,), (held,)))
    assert plan.content is not None
    assert not plan.content.externals
    assert len(plan.content.tensors) == 1
    assert plan.arguments[0][0][0][0] is held[0]


@pytest.mark.parametrize(
    ("rerun", "is_any", "may_rerun"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_who_says_whether_parts_run_again(
    rerun: bool | None, is_any: bool, may_rerun: bool
) -> None:
    assert plan_of(add, cut_of((1, 2), is_any=is_any), rerun=rerun).may_rerun is may_rerun


def test_a_function_goes_by_the_name_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(add, "__qualname__", "add__parallelize_unwrapped__")
    assert plan_of(add, cut_of((1, 2))).name.endswith("add")


def test_the_future_is_one_of_a_map() -> None:
    future = run(add, cut_of((1, 2)), None)
    assert isinstance(future, MapFuture)
    assert future.wait() == [3]
