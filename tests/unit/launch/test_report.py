from __future__ import annotations

import signal

import pytest

from weft.launch.report import TAIL_LINES, ErrorTail, describe_exit, failure_report, shell_status
from weft.launch.worker import WorkerExit


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
    ended = WorkerExit("trainer1", 2, 77, 1)
    assert failure_report(ended, "    boom") == (
        "worker 'trainer1' (rank 2, pid 77) ended with exit code 1; its last lines:\n    boom"
    )
    assert failure_report(ended, "").endswith("exit code 1; it wrote nothing to standard error")
