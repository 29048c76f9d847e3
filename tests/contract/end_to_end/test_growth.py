"""Many contexts and tensors in sequence: no resource of a worker grows with their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import torchweft
from tests import remains
from tests.contract.processes import autograd_functions
from tests.contract.processes.functions import options, wait_until
from torchweft import rpc

DRIVER, FIRST = NAMES = ("driver", "worker0")

# The first contexts import PyTorch's compiler, which starts processes of its own.
pytestmark = pytest.mark.keeps("threads", "descriptors", "processes")


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    with torchweft.cluster(workers=1, rpc_backend_options=options()):
        yield


def nothing_grows(train: Callable[[int], None], first: int, then: int) -> None:
    """Compares the resources in use after some contexts and after many more."""
    train(first)
    await_no_context()
    before = [rpc.rpc_sync(name, autograd_functions.footprint) for name in NAMES]
    train(then)
    await_no_context()
    for name, earlier in zip(NAMES, before, strict=True):
        later = rpc.rpc_sync(name, autograd_functions.footprint)
        limits = {"objects": 500, "threads": 1, "descriptors": 1, "resident_kib": 8192}
        growth = {what: later[what] - earlier[what] for what in limits}
        assert all(growth[what] <= limit for what, limit in limits.items()), (name, growth)


def await_no_context() -> None:
    def left() -> list[object]:
        found = [rpc.rpc_sync(name, remains.of_autograd) for name in NAMES]
        return [value for each in found for value in each.values() if value]

    wait_until(lambda: not left(), lambda: f"left: {left()}")


def test_two_thousand_contexts_leave_nothing_behind() -> None:
    def train(contexts: int) -> None:
        for _ in range(contexts):
            with torchweft.autograd.context() as context_id:
                leaf = autograd_functions.parameter("x")
                value = rpc.rpc_sync(FIRST, autograd_functions.layer, (leaf,))
                torchweft.autograd.backward(context_id, [value.sum()])

    nothing_grows(train, 500, 2_000)


def test_a_thousand_contexts_of_higher_order_leave_nothing_behind() -> None:
    def train(contexts: int) -> None:
        value = autograd_functions.parameter("x")
        for _ in range(contexts):
            with torchweft.autograd.context() as context_id:
                loss = rpc.rpc_sync(FIRST, autograd_functions.layer, (value,)).prod()
                (slope,) = torchweft.autograd.grad(context_id, loss, value, create_graph=True)
                torchweft.autograd.backward(context_id, [slope.pow(2).sum()])

    nothing_grows(train, 200, 1_000)
