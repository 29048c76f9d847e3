from __future__ import annotations

import dataclasses
import math
import signal
import time
from pathlib import Path

import pytest

from torchweft.launch.console import Console
from torchweft.launch.report import (
    AT_ONCE_S,
    TAIL_LINES,
    ErrorTail,
    MemoryKills,
    Repeats,
    RunReport,
    describe_exit,
    failure_report,
    shell_status,
)
from torchweft.launch.restarts import GROUP, WORKER, Attempt, RestartPolicy
from torchweft.launch.worker import WorkerExit


@pytest.mark.parametrize(
    ("exit_code", "text", "status"),
    [
        (0, "ended with exit code 0", 0),
        (3, "ended with exit code 3", 3),
        (-signal.SIGSEGV, "was killed by SIGSEGV", 139),
        (-signal.SIGKILL, "was killed by SIGKILL (out of memory, or killed by hand)", 137),
        (-200, "was killed by signal 200", 328),
    ],
)
def test_an_exit_is_said_in_words_and_as_a_shell_does(
    exit_code: int, text: str, status: int
) -> None:
    assert describe_exit(exit_code) == text
    assert shell_status(exit_code) == status


def test_the_tail_is_bounded() -> None:
    tail = ErrorTail()
    tail.extend([b"%d" % number for number in range(TAIL_LINES + 5)])
    lines = tail.text().splitlines()
    assert (len(lines), lines[0], lines[-1]) == (TAIL_LINES, "    5", f"    {TAIL_LINES + 4}")


def test_a_traceback_that_was_just_shown_is_not_shown_again() -> None:
    ended = WorkerExit("a", 0, 77, 1, ran_s=1.0)
    tail = """\
    Traceback (most recent call last):
      File "train.py", line 3, in <module>
        fail()
    ValueError: boom
    and a note of it"""
    assert failure_report(ended, tail, True).endswith(" after 1.0 s: ValueError: boom")
    assert failure_report(ended, tail, False).endswith(f"its last lines:\n{tail}")
    assert failure_report(ended, "    boom", True).endswith("its last lines:\n    boom")


# The report of a run


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


def test_a_lost_host_that_is_seen_late_is_named_as_well(said: Memory) -> None:
    group = report(said, GROUP)
    group.died(death("trainer0"), Attempt(1.0, 1), others=2)
    group.lost_before(dataclasses.replace(death("ps", -9), loss="host 'b' was lost"))
    group.summarize(1)
    lines = said.take()
    late = "2025-06-01 14:02:11: worker 'ps' (rank 0, pid 77) ended, as host 'b' was lost, after"
    assert lines[1] == f"torchweft run: {late} 12.3 s; others may have ended because of it"
    assert lines[-1] == f"    {late} 12.3 s"


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


# Kills for lack of memory


class ControlGroups:
    """A fake file system of control groups, written by the test."""

    def __init__(self, root: Path) -> None:
        self.mount = root / "mount"
        self.membership = root / "cgroup"

    def belong_to(self, *lines: str) -> None:
        self.membership.write_text("\n".join(lines) + "\n")

    def count(self, file: str, kills: int) -> None:
        path = self.mount / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"low 0\noom {kills + 3}\noom_kill {kills}\n")

    def watch(self) -> MemoryKills:
        return MemoryKills(self.mount, self.membership)


@pytest.fixture
def groups(tmp_path: Path) -> ControlGroups:
    return ControlGroups(tmp_path)


VERSIONS = [
    (("0::/user/run",), "user/run/memory.events"),
    (("5:devices:/other", "4:memory:/user/run", "0::/"), "memory/user/run/memory.oom_control"),
    (("0::/not/seen/here",), "memory.events"),
    (("4:memory:/not/seen/here",), "memory/memory.oom_control"),
]


@pytest.mark.parametrize(("lines", "file"), VERSIONS)
def test_each_new_kill_is_told_of_once(
    lines: tuple[str, ...], file: str, groups: ControlGroups
) -> None:
    groups.belong_to(*lines)
    groups.count(file, 5)
    kills = groups.watch()
    assert kills.take_one() is False
    groups.count(file, 7)
    assert [kills.take_one() for _ in range(3)] == [True, True, False]


# Repeated failures


TRACE = """\
    Traceback (most recent call last):
      File "train.py", line 3, in <module>
        import nothing
    ModuleNotFoundError: No module named 'nothing'"""


def ended(name: str = "a", exit_code: int = 1, ran_s: float = 0.5) -> WorkerExit:
    return WorkerExit(name, 0, 77, exit_code, ran_s=ran_s)


def test_numbers_and_addresses_may_differ() -> None:
    repeats = Repeats(is_of_group=True)
    assert not repeats.is_repeated(ended(), f"{TRACE} of <object at 0x7f3a>, process 12")
    assert repeats.is_repeated(ended(), f"{TRACE} of <object at 0x99bb>, process 345")


@pytest.mark.parametrize(
    ("second", "tail"),
    [
        (ended(ran_s=AT_ONCE_S), TRACE),
        (ended(exit_code=-9), TRACE),
        (ended(), TRACE.replace("nothing", "something")),
        (ended(), "    no licence"),
        (ended(), ""),
    ],
)
def test_what_may_pass_is_none(second: WorkerExit, tail: str) -> None:
    repeats = Repeats(is_of_group=True)
    assert not repeats.is_repeated(ended(), TRACE)
    assert not repeats.is_repeated(second, tail)
    assert not repeats.is_repeated(ended(), TRACE)  # not twice in a row


def test_workers_that_begin_anew_by_themselves_are_told_apart() -> None:
    repeats = Repeats(is_of_group=False)
    assert not repeats.is_repeated(ended("a"), TRACE)
    assert not repeats.is_repeated(ended("b"), TRACE)
    assert repeats.is_repeated(ended("a"), TRACE)
