"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import threading

import pytest
from torch import Tensor

import torchweft
from tests.contract.processes import autograd_functions as functions
from tests.contract.processes.test_autograd import FIRST, together
from torchweft import rpc
from torchweft.autograd.engine import current_engine

pytestmark = pytest.mark.keeps("threads", "descriptors")


@together
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
