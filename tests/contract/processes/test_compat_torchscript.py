"""TorchScript functions and modules in calls: as callables, as arguments and as results."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes.compiled import (
    no_future,
    product,
    product_later,
    raising,
    start_square,
)
from torchweft import rpc
from torchweft.autograd import backward, context, get_gradients
from torchweft.launch import Nursery
from torchweft.rpc.functions import async_execution

# Each test shares the workers of the file; they connect to one another when they first talk.
pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning"),
]
FIRST, SECOND = "worker0", "worker1"


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=2, nursery=nursery):
        yield


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.factor


def make_scripted() -> torch.jit.ScriptModule:
    return torch.jit.script(Doubling())


def kinds(*values: Any) -> list[str]:
    return [type(value).__name__ for value in values]


def call(function: Any, *args: Any) -> Any:
    return function(*args)


def test_a_compiled_function_is_called_in_each_way() -> None:
    assert isinstance(product, torch.jit.ScriptFunction)
    args = (torch.ones(2), torch.full((2,), 3.0))
    assert rpc.rpc_sync(FIRST, product, args).tolist() == [3.0, 3.0]
    assert rpc.rpc_async(FIRST, product, args, {"times": 2}).wait().tolist() == [6.0, 6.0]
    assert rpc.remote(FIRST, product, args).to_here().tolist() == [3.0, 3.0]
    assert rpc.rpc_sync("driver", product, args).tolist() == [3.0, 3.0]


def test_what_a_compiled_function_raises_arrives() -> None:
    with pytest.raises(RuntimeError, match="no pairs"):
        rpc.rpc_sync(FIRST, raising, (torch.ones(2),))
    with pytest.raises(torch.jit.Error, match="no pairs"):
        rpc.remote(FIRST, raising, (torch.ones(2),)).to_here()


def test_gradients_flow_through_a_compiled_function() -> None:
    first, second = torch.full((2,), 2.0, requires_grad=True), torch.ones(2)
    with context() as context_id:
        backward(context_id, [rpc.rpc_sync(FIRST, product, (first, second, 3)).sum()])
        assert get_gradients(context_id)[first].tolist() == [3.0, 3.0]


def test_a_compiled_function_may_answer_with_a_future() -> None:
    args = (torch.ones(2), torch.full((2,), 3.0))
    assert rpc.rpc_sync(FIRST, product_later, args).tolist() == [3.0, 3.0]
    assert rpc.remote(FIRST, product_later, args).to_here().tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match=r"no_future.* returned a Tensor"):
        rpc.rpc_sync(FIRST, no_future, (torch.ones(1),))


def test_one_that_cannot_be_imported_goes_by_value_and_outlives_its_call() -> None:
    unnamed = torch.jit.script(start_square)

    @async_execution
    def later(value: Tensor) -> Any:
        return unnamed(value)

    for _ in range(3):
        assert rpc.rpc_sync(FIRST, later, (torch.full((2,), 3.0),)).tolist() == [9.0, 9.0]


def test_compiled_functions_and_modules_are_arguments_and_results() -> None:
    module = make_scripted()
    sent = rpc.rpc_sync(FIRST, kinds, (product, module))
    assert sent == ["ScriptFunction", "RecursiveScriptModule"]
    assert rpc.rpc_sync(FIRST, call, (product, torch.ones(1), torch.ones(1))).item() == 1.0
    assert rpc.rpc_sync(FIRST, call, (module, torch.ones(1))).item() == 2.0
    back = rpc.rpc_sync(FIRST, make_scripted)
    assert isinstance(back, torch.jit.ScriptModule)
    assert back(torch.ones(1)).item() == 2.0


def test_a_compiled_module_lives_behind_a_reference() -> None:
    reference = rpc.remote(FIRST, make_scripted)
    assert reference.rpc_sync().forward(torch.ones(1)).item() == 2.0
    buffer = io.BytesIO()
    torch.jit.save(reference.to_here(), buffer)
    assert torch.jit.load(io.BytesIO(buffer.getvalue()))(torch.ones(1)).item() == 2.0
