"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.processes import autograd_functions as functions
from tests.contract.processes.functions import wait_until
from tests.contract.processes.test_compat_autograd import FIRST, await_end, debug_info
from tests.gradient_functions import Rejoin
from torchweft import rpc
from torchweft.autograd.local_pass import enable_zeros
from torchweft.compat import autograd
from torchweft.ids import worker_of
from torchweft.launch import Nursery, cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")


@pytest.fixture(scope="module", autouse=True)
def _workers(nursery: Nursery) -> Iterator[None]:
    with cluster(workers=2, nursery=nursery):
        yield


def test_a_pass_and_what_is_known_of_it() -> None:
    me = rpc.get_worker_info().id
    with autograd.context() as context_id:
        assert worker_of(context_id) == worker_of(autograd._get_max_id()) == me
        assert autograd._get_max_id() == ((me + 1) << 48) - 1
        leaf = functions.parameter("x")
        loss = rpc.rpc_sync(FIRST, functions.layer, (leaf,)).sum()
        current = autograd._current_context()
        assert current._context_id() == context_id
        assert current._known_worker_ids() == {rpc.get_worker_info(FIRST).id}
        alive = {"num_current_backward_passes": "0", "num_autograd_contexts": "1"}
        assert debug_info() == rpc.rpc_sync(FIRST, debug_info) == alive
        autograd.backward(context_id, [loss])
        assert list(autograd.get_gradients(context_id)) == [leaf]
        assert debug_info() == alive
        # The other worker takes part until it has heard that the pass is over.
        wait_until(lambda: rpc.rpc_sync(FIRST, debug_info) == alive, lambda: "a pass goes on there")
    assert debug_info()["num_autograd_contexts"] == "0"
    await_end(FIRST, context_id)
    assert rpc.rpc_sync(FIRST, debug_info)["num_autograd_contexts"] == "0"


def test_a_remote_result_without_gradient_gets_zeros_as_in_pytorch() -> None:
    enable_zeros()  # As in a worker under torchweft.compat.
    try:
        with autograd.context() as context_id:
            leaf, other = functions.parameter("x"), functions.parameter("y")
            result = rpc.rpc_sync(FIRST, functions.layer, (leaf,))
            autograd.backward(context_id, [Rejoin.apply(other * 2, result).sum()])
            gradients = autograd.get_gradients(context_id)
            assert gradients[leaf].tolist() == [0.0] * leaf.numel()
            assert gradients[other].tolist() == [2.0] * other.numel()
    finally:
        enable_zeros(False)
