"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from torch import Tensor

import torchweft
from tests import remains
from tests.contract.processes import autograd_functions as functions
from tests.contract.processes.test_autograd import FIRST
from torchweft import rpc
from torchweft.autograd.engine import current_engine
from torchweft.launch import Nursery, cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")


@pytest.fixture(scope="module")
def _workers(nursery: Nursery) -> Iterator[None]:
    with cluster(workers=2, nursery=nursery):
        yield


@pytest.fixture(autouse=True)
def _leaves_nothing(_workers: None) -> Iterator[None]:
    """Checks that no context and no pass is left on any worker."""
    yield
    remains.await_no_autograd()


def test_a_context_belongs_to_its_thread() -> None:
    received: list[Tensor] = []

    def call() -> None:
        received.append(rpc.rpc_sync(FIRST, functions.layer, (functions.parameter("x"),)))

    with torchweft.autograd.context() as context_id:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(10)
        call()
        recorded = current_engine().contexts.get(context_id).receive_of
        assert [tensor.grad_fn in recorded for tensor in received] == [False, True]
