from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.unit.mapreduce import lone_worker
from torchweft import mapreduce, rpc
from torchweft.autograd.graph import place_of
from torchweft.engine.worker.current import current
from torchweft.errors import CallCancelled, NotInitialized
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


def test_a_program_may_change_the_list_that_it_gets() -> None:
    with torchweft.autograd.context() as context_id:
        weight = torch.ones(2, requires_grad=True)
        future = run(add, cut_of((weight, 1), (weight, 2)), None)
        future.wait().clear()
        (held,) = contexts().get(context_id).recomputable
        held.compute_again()


# Errors


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


@pytest.mark.parametrize(
    ("rerun", "is_any", "may_rerun"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_who_says_whether_parts_run_again(
    rerun: bool | None, is_any: bool, may_rerun: bool
) -> None:
    assert plan_of(add, cut_of((1, 2), is_any=is_any), rerun=rerun).may_rerun is may_rerun
