from __future__ import annotations

import math
import time

import pytest

from torchweft.launch.console import Console
from torchweft.launch.restarts import GROUP, WORKER, Attempt, RestartPolicy
from torchweft.launch.run_report import RunReport
from torchweft.launch.worker import WorkerExit

MOMENT = time.mktime((2025, 6, 1, 14, 2, 11, 0, 0, -1))
NAMES = ("ps", "trainer0", "trainer1")


class Memory:
    """An output stream in memory."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, data: bytes) -> None:
        self.text += data.decode()

    def is_terminal(self) -> bool:
        return False

    def take(self) -> list[str]:
        lines, self.text = self.text.splitlines(), ""
        return lines


@pytest.fixture
def said() -> Memory:
    return Memory()


def report(said: Memory, scope: str, limit: int = 3, window_s: float = math.inf) -> RunReport:
    return RunReport(Console(said, said, {}), RestartPolicy(limit, scope, window_s=window_s), NAMES)


def death(name: str, exit_code: int = 1, **others: bool | None) -> WorkerExit:
    return WorkerExit(name, NAMES.index(name), 77, exit_code, MOMENT, 12.34, **others)


def test_a_worker_that_is_started_again(said: Memory) -> None:
    workers = report(said, WORKER, window_s=3600.0)
    workers.started("ps", 77)
    assert said.take() == []
    workers.died(death("ps", -9, is_memory_kill=True), Attempt(2.04, 1), others=2)
    workers.started("trainer0", 78)
    workers.started("ps", 79)
    assert said.take() == [
        "torchweft run: 2025-06-01 14:02:11: worker 'ps' (rank 0, pid 77) was killed by SIGKILL "
        "(out of memory) after 12.3 s; "
        "starting it again in 2.0 s, restart 1 of 3 within 60 min",
        "torchweft run: worker 'ps' runs again, with pid 79",
    ]


def test_a_group_that_is_started_again(said: Memory) -> None:
    group = report(said, GROUP)
    group.died(death("trainer0"), Attempt(1.0, 2), others=2)
    group.group_waits(Attempt(1.0, 2))
    for pid, name in enumerate(NAMES):
        group.started(name, pid)
    assert said.take() == [
        "torchweft run: 2025-06-01 14:02:11: worker 'trainer0' (rank 1, pid 77) ended with exit "
        "code 1 after 12.3 s; ending the other 2",
        "torchweft run: starting all 3 workers again in 1.0 s, restart 2 of 3",
        "torchweft run: all 3 workers run again",
    ]


def test_a_limit_that_is_reached(said: Memory) -> None:
    report(said, WORKER, window_s=600.0).died(death("ps", -11), None, others=2)
    (line,) = said.take()
    assert line.endswith(
        "was killed by SIGSEGV after 12.3 s; all 3 restarts within 10 min are used up, "
        "ending the run with exit code 139"
    )


def test_without_restarts_others_that_are_ended_are_told_of_at_once(said: Memory) -> None:
    report(said, GROUP, limit=0).died(death("ps"), None, others=1)
    assert said.take()[0].endswith("ended with exit code 1 after 12.3 s; ending the other one")
    report(said, GROUP, limit=0).died(death("ps"), None, others=0)
    assert said.take() == []  # its last output lines follow at once


def test_the_summary_lists_the_last_deaths(said: Memory) -> None:
    workers = report(said, WORKER)
    for _ in range(12):
        workers.died(death("ps"), Attempt(1.0, 1), others=2)
    said.take()
    workers.summarize(12)
    lines = said.take()
    assert lines[:2] == [
        "torchweft run: workers were started again 12 times; these had died:",
        "    (2 earlier ones)",
    ]
    one = "worker 'ps' (rank 0, pid 77) ended with exit code 1 after 12.3 s"
    assert lines[2:] == [f"    2025-06-01 14:02:11: {one}"] * 10
    workers.summarize(0)
    assert said.take() == []
