"""The workers of the GPU tests; without a GPU all tests are skipped.

The warm processes that fork workers are programs of their own. So this process, the driver of the
shared group, may use the GPU, and the processes that are forked may too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.device import ENVIRONMENT, KEEPS, missing, prepare
from tests.remains import count_references

os.environ.update(ENVIRONMENT)  # before a warm process starts, and before CUDA is initialised

import torchweft
from tests.contract.processes.functions import options, wait_until
from tests.gpu.members import Members
from tests.open_workers import OpenWorkers
from torchweft import rpc
from torchweft.launch import Cluster, Nursery

RELEASE_S = 3.0
NO_ERRORS = (
    "Attempting to run cuBLAS",  # Threads of the autograd engine meet it, and go on.
    ".*does not have a deterministic implementation",
    "Sparse invariant checks are implicitly disabled",  # The tests ask for them, one by one.
)
"""How warnings begin that torch gives on a GPU, and that mean no harm."""
HERE = Path(__file__).parent
# As for the scripts of the example, whose modules import each other.
sys.path.insert(0, str(HERE.parents[1] / "examples" / "language_model"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(KEEPS)
            for warning in NO_ERRORS:
                item.add_marker(pytest.mark.filterwarnings(f"default:{warning}"))
            if missing():
                item.add_marker(pytest.mark.skip(reason=missing()))


@pytest.fixture(scope="session")
def shared_group(nursery: Nursery) -> Iterator[Cluster]:
    prepare()
    with torchweft.cluster(
        workers=3,
        nursery=nursery,
        rpc_backend_options=options(num_worker_threads=4),
        setup=prepare,
    ) as group:
        yield group


@pytest.fixture(scope="module")
def group(shared_group: Cluster) -> Iterator[Cluster]:
    """The workers ``worker0`` to ``worker2`` of ranks 1 to 3; the test itself is ``driver``.

    After the tests of a file no worker may hold more references or values than before.
    """
    everybody = [shared_group.name, *shared_group.names]

    def count() -> dict[str, dict[str, int]]:
        return {name: rpc.rpc_sync(name, count_references) for name in everybody}

    def is_released() -> bool:
        now = count()
        return all(
            now[name][kind] <= number for name in before for kind, number in before[name].items()
        )

    before = count()
    yield shared_group
    wait_until(
        is_released, lambda: f"references before the test: {before}; now: {count()}", RELEASE_S
    )


@pytest.fixture
def members(warm: OpenWorkers, tmp_path: Path) -> Iterator[Members]:
    """A group for one test, of processes that join one by one and can be killed."""
    made = Members(warm, tmp_path / "store")
    yield made
    made.close()
