"""Tests which modules under DDP are known or refused, and the order in which they are averaged."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from torchweft.autograd import data_parallel
from torchweft.autograd.contexts import Context, SendRecord
from torchweft.autograd.data_parallel import Averaging, find_averaging
from torchweft.autograd.graph import Reached
from torchweft.autograd.local_pass import LocalPass
from torchweft.engine.protocol.backward import Progress
from torchweft.errors import AutogradError

# The threads of a process group live until the process ends.
pytestmark = pytest.mark.keeps("threads", "descriptors")


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Starts each test as if no engine had been made in this process."""
    was_watching = data_parallel._watching is not None
    forget()
    monkeypatch.setattr(data_parallel, "_guard_of", weakref.WeakKeyDictionary())
    yield
    forget()
    if was_watching:
        data_parallel.watch()


def forget() -> None:
    if data_parallel._watching is not None:
        data_parallel._watching.remove()
        data_parallel._watching = None


def make_module(**options: Any) -> Any:
    return DistributedDataParallel(nn.Linear(2, 1, bias=False), **options)


def known() -> list[Any]:
    return [module for module, _ in data_parallel.known_modules()]


def reached(message_id: int, *modules: Any) -> Reached:
    weights = [module.module.weight for module in modules]
    leaves = {get_gradient_edge(weight).node: weight for weight in weights}
    return Reached([SendRecord(message_id, 1, (), ())], leaves, {})


def averaging_of(*components: Reached) -> tuple[Averaging, Context]:
    context = Context(1, 0)
    averaging = find_averaging(components, context.gradients)
    assert averaging is not None
    return averaging, context


def held_back(averaging: Averaging, *executed: int, live: tuple[int, ...] = ()) -> list[int]:
    progress = Progress(executed=list(executed))
    averaging.hold_back(progress, bool(live), live)
    return progress.executed


def test_the_module_made_last_has_the_first_turn() -> None:
    data_parallel.watch()
    first, second = make_module(), make_module()
    averaging, context = averaging_of(reached(1, first), reached(2, second))
    for module in (first, second):
        averaging.add_all([(module.module.weight, torch.ones(1, 2))], ())
    assert held_back(averaging, 1) == []
    assert not averaging.is_due
    assert held_back(averaging, 2, 3) == []
    assert averaging.is_due
    assert context.get_gradients() == {}
    assert averaging.run().executed == [1, 2, 3]
    assert not averaging.is_due
    assert held_back(averaging, 4) == [4]
    gradients = context.get_gradients()
    assert [gradients[module.module.weight].tolist() for module in (first, second)] == [
        [[1, 1]]
    ] * 2


def test_a_module_waits_for_all_live_messages_that_lead_to_it() -> None:
    data_parallel.watch()
    module = make_module()
    averaging, _ = averaging_of(*[reached(number, module) for number in (1, 2, 3)])
    assert held_back(averaging, 1) == []
    assert held_back(averaging, live=(1, 2)) == []
    assert not averaging.is_due
    assert held_back(averaging, 2, live=(1, 2)) == []
    assert averaging.run().executed == [1, 2]


def test_a_pass_that_failed_leaves_a_static_graph_as_it_was() -> None:
    data_parallel.watch()
    module = make_module(static_graph=True)
    for is_first in (True, False):
        context = Context(1, 0)
        local = LocalPass(context)
        local.start([module(torch.ones(1, 2)).sum()])
        local.work()
        if is_first:
            local.close()
            assert not module._static_graph_delay_allreduce_enqueued
    assert module._static_graph_delay_allreduce_enqueued


def _in_backward(parameter: Any) -> Any:
    parameter._in_backward_optimizers = []
    return parameter


@pytest.mark.parametrize(
    ("attribute", "value", "match"),
    [
        ("mixed_precision", object(), "autocast"),
        ("_delay_all_reduce_params", [torch.ones(1)], "delay_all_reduce_named_params"),
        ("_use_python_reducer", True, "optimize_ddp"),
        ("_module_parameters", None, "DistributedOptimizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_refused(attribute: str, value: object, match: str) -> None:
    data_parallel.watch()
    module = make_module()
    setattr(module, attribute, value or [_in_backward(module.module.weight)])
    with pytest.raises(AutogradError, match=match):
        averaging_of(reached(1, module))


def test_a_hook_for_gradients_is_called_with_those_of_other_passes() -> None:
    data_parallel.watch()
    module = make_module()
    weight: Tensor = module.module.weight
    handle = weight.register_hook(lambda gradient: 2 * gradient)
    total = torch.ones(1, 2)
    with data_parallel._hooks_passed_by({weight: total}):
        torch.autograd.backward([weight], [total])
        assert weight.grad is not None
        assert weight.grad.tolist() == [[1, 1]]
        torch.autograd.backward([weight], [torch.ones(1, 2)])
        assert weight.grad.tolist() == [[3, 3]]
        handle.remove()
    torch.autograd.backward([weight], [torch.ones(1, 2)])
    assert weight.grad.tolist() == [[4, 4]]
