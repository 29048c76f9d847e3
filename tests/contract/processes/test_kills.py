"""Measures how soon a caller gets its error when a callee on the same host is killed.

``WEFT_TEST_KILLS`` sets the number of kills: 100 give a distribution, which ``-s`` shows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from pathlib import Path

import pytest

from tests import far_workers as far
from tests.open_workers import OpenWorkers, WarmProcess
from torchweft.errors import WorkerLost

KILLS = int(os.environ.get("WEFT_TEST_KILLS", "10"))
UNDETECTED_S = 1.0
"""Far below the failure detection time: the kernel must have reported the connection's end."""


@pytest.mark.timeout(60 + KILLS)
def test_the_caller_of_a_killed_worker_knows_at_once(
    warm_process: WarmProcess, tmp_path: Path
) -> None:
    told = {"init_method": f"file://{tmp_path}/store", "init_timeout": 20}
    elapsed_s = []
    with contextlib.closing(OpenWorkers(warm_process, far.__name__)) as workers:
        workers.do("worker0", far.join, "", {}, 0, None, told)
        for number in range(KILLS):
            key = f"call {number}"
            workers.do("worker1", far.join, "", {}, 1, None, told)
            workers.do("worker0", far.begin, key, "worker1", far.hold, key)
            workers.do("worker1", far.wait_begun, key)
            pid = workers.do("worker1", os.getpid)
            since_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            ended = workers.do("worker0", far.ending, key)
            assert isinstance(ended.error, WorkerLost)
            assert (ended.error.worker, ended.error.cause) == ("worker1", "end of file")
            elapsed_s.append(ended.at_s - since_s)
            workers.kill("worker1")
    median_ms, most_ms = 1e3 * statistics.median(elapsed_s), 1e3 * max(elapsed_s)
    print(f"{KILLS} kills: median {median_ms:.1f} ms, longest {most_ms:.1f} ms")
    assert most_ms < 1e3 * UNDETECTED_S
