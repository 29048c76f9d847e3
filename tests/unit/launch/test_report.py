from __future__ import annotations

import signal
import time

import pytest

from torchweft.launch.report import (
    TAIL_LINES,
    ErrorTail,
    describe_duration,
    describe_exit,
    failure_report,
    shell_status,
)
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
