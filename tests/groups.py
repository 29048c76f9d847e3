"""Groups of workers that tests share, and warm processes from which workers are forked.

A plugin of pytest, for all folders of tests. It belongs to the harness: it may use the internals of
Weft, and the tests in ``tests/contract``, which take its fixtures, may not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import torchweft
from tests.contract.processes.functions import options, wait_until
from tests.open_workers import PRELOAD, OpenWorkers, WarmProcess
from tests.remains import count_references
from torchweft import knobs, rpc
from torchweft.launch import Cluster, Nursery

COMPILER = ("torch._dynamo", "torch.distributed.nn", "torchweft.hybrid")
"""Modules of PyTorch's compiler, and others that import it: that takes each worker two seconds.

Optimizers that Weft does not make, and ``DistributedDataParallel``, import it.
"""


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """A warm process; all groups of the session are forked from it."""
    with Nursery(preload=(*PRELOAD, *COMPILER)) as warm:
        yield warm


@pytest.fixture(scope="session")
def warm_process() -> Iterator[WarmProcess]:
    """A warm process for workers that join one by one."""
    with contextlib.closing(WarmProcess()) as process:
        yield process


@pytest.fixture(scope="module")
def warm(warm_process: WarmProcess) -> Iterator[OpenWorkers]:
    """Workers that join one by one; those that the tests of a file leave are killed."""
    with contextlib.closing(OpenWorkers(warm_process)) as workers:
        yield workers


@pytest.fixture(scope="module")
def shared_group(nursery: Nursery) -> Iterator[Cluster]:
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options()) as group:
        yield group


@pytest.fixture
def group(shared_group: Cluster) -> Iterator[Cluster]:
    """The workers ``worker0`` and ``worker1``; the test itself is ``driver``.

    After the test every worker must hold as many references and values as before.
    """
    everybody = [shared_group.name, *shared_group.names]

    def count() -> dict[str, dict[str, int]]:
        return {name: rpc.rpc_sync(name, count_references) for name in everybody}

    before = count()
    yield shared_group
    wait_until(
        lambda: count() == before, lambda: f"references before the test: {before}; now: {count()}"
    )


@pytest.fixture
def three(nursery: Nursery) -> Iterator[Cluster]:
    """Three workers, any of which may be killed."""
    with torchweft.cluster(
        workers=3, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        yield group


@pytest.fixture
def quick_restarts() -> Iterator[None]:
    """Has workers that died started again at once."""
    with knobs.RESTART_BACKOFF_S.override(0.05):
        yield
