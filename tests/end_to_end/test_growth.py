"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torchweft
from tests.contract.end_to_end.test_growth import FIRST, NAMES
from tests.contract.processes import functions
from tests.contract.processes.functions import options
from tests.processes import shared_memory_internals
from tests.processes.shared_memory_internals import no_loans, statistics, tensor_of
from torchweft import knobs, rpc
from torchweft.launch import Nursery

# The first contexts import PyTorch's compiler, which starts processes of its own.
pytestmark = pytest.mark.keeps("threads", "descriptors", "processes")


@pytest.fixture(scope="module", autouse=True)
def _workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=options()):
        yield


def test_ten_thousand_tensors_leave_nothing() -> None:
    def measure() -> list[tuple[int, int]]:
        return [rpc.rpc_sync(name, shared_memory_internals.resources) for name in NAMES]

    sent = tensor_of(2 * knobs.INLINE_LIMIT_BYTES.get())
    for _ in range(500):
        rpc.rpc_sync(FIRST, functions.identity, args=(sent,))
    before, residents = measure(), [rpc.rpc_sync(n, statistics).resident_bytes for n in NAMES]
    for _ in range(5_000):  # there and back
        rpc.rpc_sync(FIRST, functions.identity, args=(sent,))
    no_loans(*NAMES)
    # A worker that drops its argument late needs one or two slabs more.
    for name, resident_bytes in zip(NAMES, residents, strict=True):
        assert rpc.rpc_sync(name, statistics).resident_bytes <= resident_bytes + 4 * sent.numel()
    for (bytes_before, files_before), (bytes_now, files_now) in zip(before, measure(), strict=True):
        assert files_now <= files_before
        assert bytes_now - bytes_before < 4 << 20
