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
    describe_duration,
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


def test_a_kill_is_explained_as_far_as_is_known() -> None:
    killed = "was killed by SIGKILL"
    assert describe_exit(-9, True) == f"{killed} (out of memory)"
    assert describe_exit(-9, False) == f"{killed} (not out of memory)"
    assert describe_exit(-15, False) == "was killed by SIGTERM"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (99.9, "99.9 s"),
        (100.0, "2 min"),
        (3600.0, "60 min"),
        (5970.0, "1 h 40 min"),
        (90000.0, "25 h 00 min"),
    ],
)
def test_lengths_of_time_are_said_in_fitting_units(seconds: float, text: str) -> None:
    assert describe_duration(seconds) == text


def test_the_tail_begins_at_the_traceback() -> None:
    tail = ErrorTail()
    tail.extend([b"a warning", b"Traceback (most recent call last):", b"  File ..."])
    tail.extend([b"ValueError: boom"])
    assert tail.text() == (
        "    Traceback (most recent call last):\n      File ...\n    ValueError: boom"
    )


def test_the_tail_is_bounded() -> None:
    tail = ErrorTail()
    tail.extend([b"%d" % number for number in range(TAIL_LINES + 5)])
    lines = tail.text().splitlines()
    assert (len(lines), lines[0], lines[-1]) == (TAIL_LINES, "    5", f"    {TAIL_LINES + 4}")


def test_a_report_names_the_worker_and_ends_with_its_last_lines() -> None:
    moment = time.mktime((2025, 6, 1, 14, 2, 11, 0, 0, -1))
    ended = WorkerExit("trainer1", 2, 77, 1, ended_at=moment, ran_s=12.34)
    death = "2025-06-01 14:02:11: worker 'trainer1' (rank 2, pid 77) ended with exit code 1"
    assert failure_report(ended, "    boom") == f"{death} after 12.3 s; its last lines:\n    boom"
    assert failure_report(ended, "") == f"{death} after 12.3 s; it wrote nothing to standard error"


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


def test_a_lost_host_that_is_seen_late_is_named_as_well(said: Memory) -> None:
    group = report(said, GROUP)
    group.died(death("trainer0"), Attempt(1.0, 1), others=2)
    group.lost_before(dataclasses.replace(death("ps", -9), loss="host 'b' was lost"))
    group.summarize(1)
    lines = said.take()
    late = "2025-06-01 14:02:11: worker 'ps' (rank 0, pid 77) ended, as host 'b' was lost, after"
    assert lines[1] == f"torchweft run: {late} 12.3 s; others may have ended because of it"
    assert lines[-1] == f"    {late} 12.3 s"


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


def test_nothing_is_claimed_where_nothing_is_counted(groups: ControlGroups) -> None:
    assert groups.watch().take_one() is None
    groups.belong_to("0::/", "1:name=systemd:/")
    assert groups.watch().take_one() is None
    groups.count("memory.events", 1)
    (groups.mount / "memory.events").write_text("oom 3\n")
    assert groups.watch().take_one() is None


def test_a_counter_that_vanishes_says_nothing(groups: ControlGroups) -> None:
    groups.belong_to("0::/")
    groups.count("memory.events", 1)
    kills = groups.watch()
    (groups.mount / "memory.events").unlink()
    assert kills.take_one() is None


def test_this_machine_is_read_without_an_error() -> None:
    assert MemoryKills().take_one() in (None, False)


# Repeated failures


TRACE = """\
    Traceback (most recent call last):
      File "train.py", line 3, in <module>
        import nothing
    ModuleNotFoundError: No module named 'nothing'"""


def ended(name: str = "a", exit_code: int = 1, ran_s: float = 0.5) -> WorkerExit:
    return WorkerExit(name, 0, 77, exit_code, ran_s=ran_s)


def test_the_same_traceback_at_once_is_a_bug() -> None:
    repeats = Repeats(is_of_group=True)
    assert not repeats.is_repeated(ended(), TRACE)
    assert repeats.is_repeated(ended("b"), TRACE)


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


def test_without_a_traceback_nothing_is_known() -> None:
    repeats = Repeats(is_of_group=True)
    assert not repeats.is_repeated(ended(), "    no licence")
    assert not repeats.is_repeated(ended(), "    no licence")


def test_workers_that_begin_anew_by_themselves_are_told_apart() -> None:
    repeats = Repeats(is_of_group=False)
    assert not repeats.is_repeated(ended("a"), TRACE)
    assert not repeats.is_repeated(ended("b"), TRACE)
    assert repeats.is_repeated(ended("a"), TRACE)
