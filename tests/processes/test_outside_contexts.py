"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

from tests import remains
from tests.contract.processes import outside_functions as functions
from tests.contract.processes.test_outside_contexts import FIRST, SECOND
from torchweft import rpc
from torchweft.autograd import context
from torchweft.autograd.contexts import current_id
from torchweft.launch import Nursery, cluster

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")


@pytest.fixture(scope="module")
def _workers(nursery: Nursery) -> Iterator[None]:
    with cluster(workers=2, nursery=nursery):
        yield


@pytest.fixture(autouse=True)
def _leaves_nothing(_workers: None) -> Iterator[None]:
    yield
    gc.collect()
    for worker in (FIRST, SECOND):
        rpc.rpc_sync(worker, functions.forget)
    remains.await_no_autograd(remains.of_autograd_outside)


def test_work_of_a_thread_pool_in_a_copy_of_the_context() -> None:
    with context() as context_id, ThreadPoolExecutor(1) as pool:
        assert pool.submit(current_id).result() == 0
        assert pool.submit(copy_context().run, current_id).result() == context_id
        assert asyncio.run(asyncio.to_thread(current_id)) == context_id
        assert pool.submit(current_id).result() == 0
