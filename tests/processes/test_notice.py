"""``SIGTERM`` of a scheduler as a notice, in processes of their own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.contract.processes.functions import wait_until
from tests.open_workers import OpenWorkers
from torchweft import notice


def heed(path: str, exit_code: int | None = None) -> int:
    """Has this process heed a notice; returns its id.

    Args:
        path: The file by which the launcher is told.
        exit_code: That of the program's own handler of the signal, if it has one.
    """
    os.environ[notice.VARIABLE] = path
    own = signal.SIG_DFL if exit_code is None else lambda *_: os._exit(exit_code)
    signal.signal(signal.SIGTERM, own)
    notice.heed_notice()
    return os.getpid()


def is_notice_given() -> bool:
    return notice.is_notice_given()


def wait_for_the_end() -> None:
    while True:
        signal.pause()


def signal_of_a_child(path: str) -> int:
    """Returns the signal that ends a forked process which heeds it as its parent does."""
    heed(path)
    pid = os.fork()
    if not pid:
        notice.heed_notice()
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    return os.waitpid(pid, 0)[1]


def check_ends(warm: OpenWorkers, pid: int) -> None:
    warm.begin("a", wait_for_the_end)
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(ConnectionError, match="died"):
        warm.result("a")
    warm.kill("a")


def test_the_first_signal_is_a_notice_and_the_launchers_own_ends(
    warm: OpenWorkers, tmp_path: Path
) -> None:
    pid = warm.do("a", heed, f"{tmp_path}/notice")
    assert not warm.do("a", is_notice_given)
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: warm.do("a", is_notice_given), lambda: "no notice")
    (tmp_path / "ending").touch()
    check_ends(warm, pid)


def test_a_handler_of_the_program_stays(warm: OpenWorkers, tmp_path: Path) -> None:
    check_ends(warm, warm.do("a", heed, f"{tmp_path}/notice", 9))
    assert not (tmp_path / "notice").exists()


def test_processes_that_the_worker_has_forked_end(warm: OpenWorkers, tmp_path: Path) -> None:
    ended_by = warm.do("a", signal_of_a_child, f"{tmp_path}/notice")
    assert ended_by == signal.SIGTERM
    warm.kill("a")
