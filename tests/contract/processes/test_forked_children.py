"""A child that a remote function forks ends as it comes back; only its parent is the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import torchweft
from tests.contract.processes import forking_functions as functions
from tests.contract.processes.functions import options, wait_until
from tests.open_workers import OpenWorkers
from torchweft import rpc
from torchweft.launch import Cluster, Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")


@pytest.fixture(scope="module")
def forking(nursery: Nursery) -> Iterator[Cluster]:
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options()) as group:
        yield group


def check_is_sound() -> None:
    """Checks that calls are answered, over old and new connections, and that no child is left."""

    def left() -> set[int]:
        return rpc.rpc_sync("worker0", functions.children)

    wait_until(lambda: not left(), lambda: f"children are left: {left()}")
    with ThreadPoolExecutor(8) as pool:
        for number in pool.map(lambda n: rpc.rpc_sync("worker0", functions.ping, (n,)), range(200)):
            assert number >= 0
    assert rpc.rpc_sync("worker1", ask, ("worker0",)) == 5


def ask(worker: str) -> int:
    return rpc.rpc_sync(worker, functions.ping, (5,))


@pytest.mark.parametrize(("way", "answer"), functions.WAYS.items())
def test_a_child_that_comes_back_ends(
    forking: Cluster, way: Callable[[], str], answer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = ["came back out of that function", "does not end in the function"]
    said = ""

    def is_said() -> bool:
        nonlocal said  # The lines of workers take their time.
        said += capfd.readouterr().err
        return all(text in said for text in wanted[: 2 if way is functions.raises else 1])

    assert rpc.rpc_sync("worker0", way) == answer
    check_is_sound()
    wait_until(is_said, lambda: said)


def test_a_child_that_ends_in_the_function_may_join_another_group(forking: Cluster) -> None:
    assert rpc.rpc_sync("worker0", functions.runs_a_process) == (0, "[2.0, 2.0]")
    assert rpc.rpc_sync("worker0", functions.waits_for_a_child) == 7
    check_is_sound()


def test_a_forked_process_joins_another_group_by_pytorchs_names(
    warm: OpenWorkers, tmp_path: Path
) -> None:
    found = warm.do("trainer", functions.joins_by_torchs_names, str(tmp_path))
    assert found == ("[2.0]", [2.0])
    warm.kill("trainer")
