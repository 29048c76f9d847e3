"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torchweft
from torchweft import rpc
from torchweft.engine.protocol.observing import lead_of
from torchweft.launch import Nursery
from torchweft.pipeline import (
    recording,
)

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=3, nursery=nursery):
        yield


def test_a_clock_is_read_through_a_call() -> None:
    info = rpc.get_worker_info("worker0")
    for each in recording._readings(info):
        # Both clocks are one: the true difference is 0.
        found = lead_of([each])
        assert abs(found.ahead_s) <= found.error_s
