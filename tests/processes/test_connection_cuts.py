"""Connections that break while both workers live: every call runs once, every tensor arrives.

``WEFT_TEST_CUTS`` and ``WEFT_TEST_CUT_CALLS`` make it a long run: 1000 cuts during 100,000 calls.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import torchweft
from tests.contract.processes.functions import options
from tests.internal import overridden
from tests.processes import cutting
from tests.processes.cutting import CuttingNetwork
from torchweft import rpc
from torchweft.engine.io.session import ResumableLink
from torchweft.engine.worker.current import current
from torchweft.launch import Cluster, Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors")

CUTS = int(os.environ.get("WEFT_TEST_CUTS", "40"))
CALLS = int(os.environ.get("WEFT_TEST_CUT_CALLS", "4000"))
IN_FLIGHT = 100
BYTES_A_CALL = 150
"""Approximate size of a call and its answer, with the session's overhead."""

_counts: Counter[str] = Counter()


def count(key: str) -> int:
    _counts[key] += 1
    return _counts[key]


def counts() -> dict[str, int]:
    return dict(_counts)


def forget_counts() -> None:
    _counts.clear()


def add_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def resumptions(worker: str) -> int:
    link = current().find(worker).link
    assert isinstance(link, ResumableLink)
    return link.resumption_count


@pytest.fixture(scope="module")
def over_tcp(nursery: Nursery) -> Iterator[Cluster]:
    settings = {
        "WEFT_SHM_LIMIT_BYTES": "0",
        **overridden(UNIX_SOCKETS=0, CMA_FROM_BYTES=1 << 60, STRIPED_FROM_BYTES=1 << 19),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options()) as group:
            yield group


def cut_now(*workers: str) -> None:
    """Breaks connections of this process, which reconnects over the current network."""
    for worker in workers:
        link = current().find(worker).link
        if isinstance(link, ResumableLink):
            link.break_off("a test")


@pytest.fixture
def network(over_tcp: Cluster, request: pytest.FixtureRequest) -> Iterator[CuttingNetwork]:
    """A network between this process and the workers that makes a given number of cuts."""
    mean_bytes, most_cuts = request.param
    breaking = CuttingNetwork(7, mean_bytes, most_cuts)
    for name in over_tcp.names:
        rpc.rpc_sync(name, forget_counts)
    dial_all(over_tcp, breaking.port)
    yield breaking
    dial_all(over_tcp, None)
    for name in over_tcp.names:
        rpc.rpc_sync(name, counts)
    print(breaking.close())


def dial_all(group: Cluster, port: int | None) -> None:
    """Makes this process and the workers reconnect to each other, over a network."""
    cutting.dial_through(port)
    for name in group.names:
        rpc.rpc_sync(name, cutting.dial_through, args=(port,))
    cut_now(*group.names)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("network", [(BYTES_A_CALL * CALLS // CUTS, CUTS)], indirect=True)
def test_counters_are_exact(over_tcp: Cluster, network: CuttingNetwork) -> None:
    before = sum(map(resumptions, over_tcp.names))
    made: Counter[tuple[str, str]] = Counter()
    answers: Counter[tuple[str, str]] = Counter()
    waiting: list[tuple[tuple[str, str], torchweft.Future[int]]] = []
    for number in range(CALLS):
        place = over_tcp.names[number % 2], f"key {number % 7}"
        made[place] += 1
        if number % 5:
            waiting.append((place, rpc.rpc_async(place[0], count, args=(place[1],))))
        else:
            answers[place] = max(answers[place], rpc.rpc_sync(place[0], count, args=(place[1],)))
        if len(waiting) >= IN_FLIGHT:
            for at, future in waiting:
                answers[at] = max(answers[at], future.wait())
            waiting.clear()
    for at, future in waiting:
        answers[at] = max(answers[at], future.wait())
    found = {
        (name, key): value
        for name in over_tcp.names
        for key, value in rpc.rpc_sync(name, counts).items()
    }
    assert found == dict(made) == dict(answers)
    resumed = sum(map(resumptions, over_tcp.names)) - before
    print(f"{CALLS} calls, {sum(found.values())} counted, {resumed} sessions resumed")
    assert resumed >= CUTS / 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("network", [(4 << 20, 30)], indirect=True)
def test_tensors_of_all_sizes_arrive(over_tcp: Cluster, network: CuttingNetwork) -> None:
    chance = torch.Generator().manual_seed(3)
    sizes = [3, 20_000, 120_000, 600_000]
    before = sum(map(resumptions, over_tcp.names))
    for _ in range(12):
        sent = [torch.randn(size, generator=chance) for size in sizes]
        futures = [
            rpc.rpc_async(name, add_one, args=(tensor,))
            for name in over_tcp.names
            for tensor in sent
        ]
        for tensor, future in zip(sent * 2, futures, strict=True):
            assert torch.equal(future.wait(), tensor + 1)
    assert sum(map(resumptions, over_tcp.names)) > before
