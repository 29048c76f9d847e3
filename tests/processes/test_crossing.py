"""Two workers that simultaneously send each other more than a socket holds, by blocking calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torchweft
from tests.contract.processes.functions import options
from tests.internal import overridden
from torchweft import rpc
from torchweft.launch import Cluster, Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors")
ROUNDS = 20
ELEMENTS = 2 << 20  # 8 MiB: many times what a socket holds


def first_of(tensor: torch.Tensor) -> float:
    return float(tensor[0])


def exchange(other: str, rounds: int) -> float:
    """Sends a large tensor repeatedly, while the other worker does the same."""
    tensor = torch.ones(ELEMENTS)
    return sum(rpc.rpc_sync(other, first_of, args=(tensor,)) for _ in range(rounds))


@pytest.fixture(scope="module")
def streaming(nursery: Nursery) -> Iterator[Cluster]:
    """Workers whose tensors of any size follow their messages in the stream."""
    with pytest.MonkeyPatch.context() as patch:
        never = {f"{way}_FROM_BYTES": 1 << 60 for way in ("SHM", "CMA", "STRIPED")}
        for name, value in overridden(**never).items():
            patch.setenv(name, value)
        with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options()) as group:
            yield group


def test_both_send_and_none_waits_for_ever(streaming: Cluster) -> None:
    there = rpc.rpc_async("worker0", exchange, args=("worker1", ROUNDS))
    back = rpc.rpc_async("worker1", exchange, args=("worker0", ROUNDS))
    assert there.wait() == ROUNDS
    assert back.wait() == ROUNDS
