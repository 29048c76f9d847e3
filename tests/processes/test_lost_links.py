"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import far_workers as far
from tests.contract.processes.functions import stop
from tests.contract.processes.hosts import Host, network
from tests.contract.processes.test_lost_links import end_well
from tests.far_workers import far_workers
from tests.internal import overridden
from tests.open_workers import OpenWorkers, WarmProcess

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def warm(warm_process: WarmProcess) -> Iterator[OpenWorkers]:
    with contextlib.closing(OpenWorkers(warm_process, far.__name__)) as started:
        yield started


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with network() as made:
        yield made


def test_a_stopped_worker_is_not_lost(warm: OpenWorkers, hosts: list[Host], tmp_path: Path) -> None:
    # Send over the session: its connection stays full for so long that the kernel ends it.
    settings = overridden(STRIPED_FROM_BYTES=1 << 40)
    with far_workers(warm, hosts, tmp_path, settings, detection_time=1) as workers:
        workers.call_each_other()
        first, second = workers.names
        pid = workers.do(second, os.getpid)
        stop(pid)
        try:
            workers.do(first, far.begin_doubling, "large", second, 32 << 20)
            workers.do(first, far.release, second)
            time.sleep(3.5)  # how long the worker is stopped
            assert workers.do(first, far.states)[second] != "LOST"
            assert not workers.do(first, far.has_ended, "held")
        finally:
            os.kill(pid, signal.SIGCONT)
        workers.do(second, far.release, first)
        assert workers.do(first, far.ending, "large").value is True
        for name in workers.names:
            assert workers.do(name, far.ending, "held").error is None
        end_well(workers)
