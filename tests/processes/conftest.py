"""A group of workers that the tests of a file share, and a check that no reference leaks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import torchweft
from tests.processes.functions import wait_until
from tests.processes.open_workers import PRELOAD, OpenWorkers, WarmProcess
from tests.remains import count_references
from torchweft import rpc
from torchweft.launch import Cluster, Nursery

WORKER_THREADS = 2
"""So few that calls which wait for one another would exhaust the threads if each held one."""


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


def options(**others: float) -> rpc.RpcBackendOptions:
    return rpc.RpcBackendOptions(
        **{"num_worker_threads": WORKER_THREADS, "rpc_timeout": 20.0, **others}  # type: ignore[arg-type]
    )


def raised_by(wait: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception) as caught:
        wait()
    return caught.value


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
