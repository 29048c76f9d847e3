"""The benchmark of weights by version, in small: its pauses are judged on a quiet machine only."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.weights.work import Clock

LIMIT_S = 100.0

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


def test_its_bytes_and_versions_meet_their_targets() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.weights", *"--megabytes 4 --steps 2 --kills 1".split()],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    verdicts = [line for line in done.stdout.splitlines() if line.startswith("- ")]
    assert len(verdicts) == 13, done.stdout + done.stderr
    judged = [line for line in verdicts if "at most a batch" not in line]
    assert len(judged) == 7
    assert all(line.startswith("- met: ") for line in judged), judged


def test_a_stop_by_another_thread_of_the_process_counts_and_a_sleep_does_not() -> None:
    took_s = []

    def hold() -> None:
        began_s = time.thread_time()
        sum(range(5_000_000))  # One call in C, which keeps the interpreter's lock.
        took_s.append(time.thread_time() - began_s)

    clock = Clock()
    thread = threading.Thread(target=hold)
    thread.start()
    while not took_s:
        time.sleep(0)
    stopped_s = clock.lap_s()
    thread.join()
    assert stopped_s > 0.5 * took_s[0]
    clock.lap_s()
    time.sleep(0.05)
    assert clock.lap_s() < 0.04
