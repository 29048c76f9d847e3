"""OpenMP threads spin less while threads of the host wait for cores, and only then."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from torchweft.engine.worker import process
from torchweft.engine.worker.process import SpinLimit

NAME = "weft-test-openmp"


class Host:
    """A host that is busy or idle, as the test chooses."""

    def __init__(self) -> None:
        self.is_busy = True

    def running(self) -> int:
        cores = os.cpu_count() or 1
        return cores + 2 if self.is_busy else cores + 1  # including the caller


@pytest.fixture(autouse=True)
def _undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(variable, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def limit(host: Host) -> Iterator[SpinLimit]:
    limit = SpinLimit(NAME, host.running)
    yield limit
    limit.close()


def has_team() -> bool:
    return NAME in [thread.name for thread in threading.enumerate()]


def looks(limit: SpinLimit, count: int) -> None:
    for number in range(count):
        assert limit.tick(float(number)) == number + 1.0


@pytest.mark.skipif(process._loaded_library() is None, reason="this torch has another OpenMP")
def test_a_team_while_the_host_is_busy(limit: SpinLimit, host: Host) -> None:
    threads_before = list_threads()
    looks(limit, 1)
    host.is_busy = False
    looks(limit, 1)
    host.is_busy = True
    looks(limit, 1)
    assert not has_team(), "a moment is not enough"
    looks(limit, 2)
    assert has_team()
    wait_for_new_threads(threads_before, 2)  # the team's owner and at least one more
    host.is_busy = False
    looks(limit, 19)
    assert has_team()
    looks(limit, 1)
    assert not has_team()


def list_threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def wait_for_new_threads(before: set[str], count: int) -> None:
    # Teams of earlier tests may end meanwhile. The test's own time limit bounds this.
    while len(list_threads() - before) < count:
        os.sched_yield()


def test_closing_ends_it_for_good(limit: SpinLimit) -> None:
    looks(limit, 2)
    limit.close()
    assert not has_team()
    assert [limit.tick(float(number)) for number in range(4)] == [math.inf] * 4
    assert not has_team()
