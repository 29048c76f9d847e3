"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import math

import pytest

from tests.contract.processes import generator_functions as functions
from torchweft import rpc
from torchweft.launch import Cluster
from torchweft.rpc.node import current_node

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")


@pytest.fixture(autouse=True)
def _forgotten(group: Cluster) -> None:
    rpc.rpc_sync("worker0", functions.forget)


def test_calls_for_values_are_counted_under_the_name_of_the_stream() -> None:
    counting = current_node().reporter.counting
    counting.extend(60.0)
    try:
        assert list(rpc.stream("worker0", functions.count_on, (3,))) == [0, 1, 2]
        counted = {each.function: each.calls for each in counting.counts()}
    finally:
        counting.tick(math.inf)
    assert counted["a value of the stream of count_on"] >= 4
