"""Remote modules in TorchScript, as PyTorch's own tests use them, on real workers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.conformance.shims.remote_module import RemoteModule, _RemoteModule
from tests.contract.processes.compiled import (
    NoForward,
    ScaleInterface,
    call_twice,
    overlap,
)
from torchweft import rpc
from torchweft.autograd import backward, context, get_gradients
from torchweft.errors import ArgumentTypeError, ConfigurationError, SerializationError
from torchweft.launch import Nursery

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


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, value: Tensor, times: int) -> tuple[Tensor, int]:
        return value * self.factor * times, times


def is_scripted(module: Any) -> bool:
    return isinstance(module.local_value(), torch.jit.ScriptModule)


def make_number() -> int:
    return 3


def test_what_makes_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"returns an instance of <class nn\.Module>,"):
        _RemoteModule(FIRST, make_number, _module_interface_cls=ScaleInterface)


def scriptable() -> _RemoteModule:
    return _RemoteModule(FIRST, Scale, (2.0,), _module_interface_cls=ScaleInterface)


def test_scripted_code_calls_a_remote_module_by_its_interface() -> None:
    module = scriptable()
    assert module.is_scriptable
    assert rpc.rpc_sync(FIRST, is_scripted, (module.get_module_rref(),))
    assert module(torch.ones(1), 3)[0].item() == 6.0
    scripted = torch.jit.script(module)
    assert isinstance(scripted, torch.jit.ScriptModule)
    assert call_twice(scripted, torch.ones(1)).item() == 16.0
    assert overlap(scripted, torch.ones(1)).item() == 4.0 + 6.0
    assert scripted.forward_async(torch.ones(1), 2).wait()[0].item() == 4.0


def test_two_of_one_interface_are_two() -> None:
    first, second = (
        torch.jit.script(
            _RemoteModule(FIRST, Scale, (factor,), _module_interface_cls=ScaleInterface)
        )
        for factor in (2.0, 3.0)
    )
    assert call_twice(first, torch.ones(1)).item() == 16.0
    assert call_twice(second, torch.ones(1)).item() == 36.0
    del first
    assert call_twice(second, torch.ones(1)).item() == 36.0


@pytest.mark.parametrize(("run", "expected"), [(call_twice, 16.0), (overlap, 10.0)])
def test_gradients_flow_through_scripted_calls(run: Any, expected: float) -> None:
    module = scriptable()
    (parameter,) = module.remote_parameters()
    value = torch.ones(1, requires_grad=True)
    with context() as context_id:
        backward(context_id, [run(torch.jit.script(module), value).sum()])
        assert get_gradients(context_id)[value].item() == expected
        there = rpc.rpc_sync(FIRST, gradient_of, (context_id, parameter))
    assert there.item() == {16.0: 16.0, 10.0: 5.0}[expected]


def gradient_of(context_id: int, parameter: Any) -> Tensor:
    return get_gradients(context_id)[parameter.local_value()]


def test_an_error_of_the_module_reaches_scripted_code() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        call_twice(
            torch.jit.script(_RemoteModule(FIRST, Wide, (), None, ScaleInterface)), torch.ones(7)
        )


class Wide(Scale):
    def __init__(self) -> None:
        super().__init__(1.0)
        self.factor = nn.Parameter(torch.ones(3))


def test_a_scripted_one_stays_where_it_is() -> None:
    scripted = torch.jit.script(scriptable())
    with pytest.raises(SerializationError, match="Passing a script RemoteModule over RPC is not"):
        rpc.rpc_sync(SECOND, type, (scripted,))
    with pytest.raises(torch.jit.Error, match="can only be pickled when using RPC"):
        torch.save(scripted, io.BytesIO())


def test_the_interface_stays_behind() -> None:
    module = scriptable()
    there = rpc.rpc_sync(SECOND, copies, (module,))
    assert there == (False, "no TorchScript interface")
    rref = module.get_module_rref()
    again = RemoteModule.init_from_module_rref(FIRST, rref, ScaleInterface)
    assert call_twice(torch.jit.script(again), torch.ones(1)).item() == 16.0


def copies(module: RemoteModule) -> tuple[bool, str]:
    try:
        torch.jit.script(module)
    except ConfigurationError as error:
        return module.is_scriptable, str(error)[len("this RemoteModule has ") :].split(";")[0]
    raise AssertionError


def test_what_is_no_interface_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"pass a class with @torch\.jit\.interface"):
        _RemoteModule(FIRST, Scale, (2.0,), _module_interface_cls=Scale)
    with pytest.raises(ArgumentTypeError, match="NoForward has no method forward"):
        _RemoteModule(FIRST, Scale, (2.0,), _module_interface_cls=NoForward)
