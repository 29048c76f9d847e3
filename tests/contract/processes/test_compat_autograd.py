"""Distributed autograd under PyTorch's names."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch

from tests.contract.processes import autograd_functions as functions
from torchweft import rpc
from torchweft.compat import autograd
from torchweft.errors import ArgumentTypeError, AutogradError
from torchweft.launch import Nursery, cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")

LIMIT_S = 10.0
FIRST = "worker0"


@pytest.fixture(scope="module", autouse=True)
def _workers(nursery: Nursery) -> Iterator[None]:
    with cluster(workers=2, nursery=nursery):
        yield


def debug_info() -> dict[str, str]:
    return autograd._get_debug_info()


def is_alive(context_id: int) -> bool:
    try:
        autograd._retrieve_context(context_id)
    except AutogradError:
        return False
    return True


def await_end(worker: str, context_id: int) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while rpc.rpc_sync(worker, is_alive, (context_id,)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_passes_are_counted_while_they_run() -> None:
    counted: list[str] = []

    def count(_: object) -> None:
        counted.append(debug_info()["num_current_backward_passes"])

    with autograd.context() as context_id:
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        doubled = leaf * 2
        doubled.register_hook(count)
        loss = rpc.rpc_sync(FIRST, functions.layer, (doubled,)).sum()
        autograd.backward(context_id, [loss])
    assert counted == ["1"]
    await_end(FIRST, context_id)


def test_contexts_by_hand() -> None:
    made = autograd._new_context()
    assert isinstance(made, autograd.DistAutogradContext)
    number = made._context_id()
    assert autograd._current_context()._context_id() == number
    autograd._is_valid_context(number)
    gc.collect()  # Nothing but the thread's state names the context that is open.
    rpc.rpc_sync(FIRST, functions.layer, (functions.parameter("x"),))
    assert rpc.rpc_sync(FIRST, is_alive, (number,))
    autograd._release_context(number)
    await_end(FIRST, number)
    for use in (
        autograd._retrieve_context,
        autograd._release_context,
        autograd._is_valid_context,
    ):
        with pytest.raises(
            AutogradError, match=f"Could not find autograd context with id: {number}"
        ):
            use(number)
    with pytest.raises(AutogradError, match="doesn't have a valid autograd context"):
        autograd._current_context()


def test_contexts_do_not_nest() -> None:
    text = "Already have an autograd context id for this thread"
    with autograd.context():
        with pytest.raises(AutogradError, match=text), autograd.context():
            raise AssertionError("nested")
        with pytest.raises(AutogradError, match=text):
            autograd._new_context()
    assert debug_info()["num_autograd_contexts"] == "0"


def test_arguments_that_pytorch_refuses() -> None:
    scalar = torch.ones((), requires_grad=True)
    with autograd.context() as context_id:
        for number, roots in ((context_id, None), (None, [scalar * 2]), (context_id, [1.0])):
            with pytest.raises(ArgumentTypeError, match="incompatible function arguments"):
                autograd.backward(number, roots)  # type: ignore[arg-type]
        for root, text in (
            (scalar, "does not have a valid gradient function"),
            (torch.ones(()), "requires_grad not set on"),
            (torch.ones(3, requires_grad=True), "is not a scalar, all roots need to be scalar"),
        ):
            with pytest.raises(AutogradError, match=text):
                autograd.backward(context_id, [root])
        with pytest.raises(AutogradError, match="No tensors provided for gradient computation"):
            autograd.backward(context_id, [])


def test_another_number_than_the_workers_is_refused() -> None:
    me = rpc.get_worker_info().id
    with pytest.raises(AutogradError, match=f"already initialized, as that of worker {me}"):
        autograd._init(me + 1)
