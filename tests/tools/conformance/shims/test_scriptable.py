"""Tests stand-ins, which ``torch.jit.script`` compiles in place of a remote module."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.shims import scriptable
from tests.conformance.shims.scriptable import Signature, read_signature, stand_in
from tests.contract.processes.compiled import (
    NoForward,
    ScaleInterface,
    WithClass,
    call_twice,
    overlap,
)
from torchweft.errors import ArgumentTypeError, ReferenceGone

pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")


class LocalFuture:
    def __init__(self, result: Any) -> None:
        self.go_on = threading.Event()
        self._result = result

    def wait(self) -> Any:
        assert self.go_on.wait(10)
        return self._result


class LocalChain:
    """Multiplies by ``2 * times``, without any worker; futures wait for ``go_on``."""

    def __init__(self, are_ready: bool = True) -> None:
        self.futures: list[LocalFuture] = []
        self.threads: list[threading.Thread] = []
        self._are_ready = are_ready

    def __call__(self, value: Tensor, times: int) -> tuple[Tensor, int]:
        return value * 2 * times, times

    def forward_async(self, value: Tensor, times: int) -> LocalFuture:
        self.futures.append(LocalFuture(self(value, times)))
        self.threads.append(threading.current_thread())
        if self._are_ready:
            self.futures[-1].go_on.set()
        return self.futures[-1]


def scripted(chain: Any) -> Any:
    return torch.jit.script(stand_in(ScaleInterface, chain))


def test_the_signature_is_that_of_the_interface() -> None:
    assert read_signature(ScaleInterface) == Signature(
        "value: Tensor, times: int", "value, times", "Tuple[Tensor, int]"
    )


@pytest.mark.parametrize(
    ("interface", "message"), [(int, "pass a class with @"), (NoForward, "no method forward")]
)
def test_other_classes_are_refused(interface: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        read_signature(interface)


def test_types_that_only_a_program_knows_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="use tensors, numbers, strings"):
        stand_in(WithClass, LocalChain())  # type: ignore[arg-type]


def test_compiled_code_calls_the_chain() -> None:
    assert call_twice(scripted(LocalChain()), torch.ones(1)).item() == 16.0


def test_calls_start_where_they_are_made_and_overlap() -> None:
    chain = LocalChain()
    assert overlap(scripted(chain), torch.ones(1)).item() == 4.0 + 6.0
    assert chain.threads == [threading.current_thread()] * 2


def test_a_call_that_was_started_ends_though_the_module_is_gone() -> None:
    chain = LocalChain(are_ready=False)
    module = scripted(chain)
    future = module.forward_async(torch.ones(1), 3)
    del module
    chain.futures[0].go_on.set()
    assert future.wait()[0].item() == 6.0
    assert not scriptable._started


def test_nothing_is_left_of_a_module_that_is_gone() -> None:
    first, second = scripted(LocalChain()), scripted(LocalChain())
    number = first.number
    assert {number, second.number} <= set(scriptable._all_calls)
    del first
    gc.collect()  # The compiler's wrapper refers to itself.
    assert call_twice(second, torch.ones(1)).item() == 16.0
    with pytest.raises(ReferenceGone, match=r"keep what torch\.jit\.script returned"):
        scriptable._calls_of(number)
