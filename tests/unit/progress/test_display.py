"""Tests the display as a log, with made-up events and a real thread.

No test waits for a fixed time: a test waits until the expected text was written.
"""

from __future__ import annotations

import io
import logging
import sys
import threading

import pytest

from tests.unit.progress.watched import NEVER_S, OFTEN_S, WAIT_S, WORKERS, Watched, run_job
from torchweft.errors import ConfigurationError
from torchweft.progress import Display
from torchweft.progress.display import MOST_LISTED, can_change_rows


def test_a_log_gets_plain_lines() -> None:
    out = Watched()
    with Display(label="epoch", out=out, interval_s=OFTEN_S) as shown:
        run_job(shown.work, 1)
        shown.step()
        out.await_text("parts of inner 2/2\n")
        run_job(shown.work, 2, slow_s=7.0)
        shown.work.begun(3, "inner", 2, WORKERS)
        shown.work.lost(3, "worker0", [0, 1])
        out.await_text("run again on others\n")
    text = out.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert lines.count("worker1 is behind: part 1 of inner for 7.0 s (median 0.1 s)") == 1
    assert lines.count("worker0 was lost; parts 0, 1 run again on others") == 1
    assert lines[-1].startswith("epoch: 1 step, 4 parts in ")


def test_a_log_is_not_told_the_same_again() -> None:
    out = Watched()
    with Display(label="epoch", out=out, interval_s=OFTEN_S) as shown:
        shown.step()
        out.await_text("epoch 1")
        shown.work.begun(1, "inner", 2, WORKERS)
        out.await_text("parts of inner 0/2\n")
        shown._log()
    assert out.getvalue().count("parts of inner 0/2\n") == 1


def test_a_log_line_comes_no_more_often_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweft.progress.display.LOOK_EVERY_S", OFTEN_S)
    out = Watched()
    with Display(out=out, interval_s=NEVER_S) as shown:
        run_job(shown.work, 1)
        shown.step()
        shown.work.begun(2, "inner", 2, WORKERS)
        shown.work.lost(2, "worker0", [])
        out.await_text("worker0 was lost\n")
        shown.work.lost(2, "worker1", [])
        out.await_text("worker1 was lost\n")
    assert len(out.getvalue().splitlines()) == 3


def test_many_stragglers_at_once_take_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweft.progress.display.LOOK_EVERY_S", NEVER_S)
    out = Watched()
    with Display(out=out, interval_s=NEVER_S) as shown:
        run_job(shown.work, 1)
        shown.work.begun(2, "inner", 140, WORKERS)
        for part in range(140):
            shown.work.ended(2, part, "worker0", 0.1 if part < 100 else 7.0)
    lines = out.getvalue().splitlines()
    assert len(lines) == MOST_LISTED + 2
    assert lines[-2] == "and 32 more are lost or behind"
    assert "worker0 141 (0:04:50, 40 behind)" in lines[-1]


def test_what_happened_last_is_told_at_the_end() -> None:
    out = Watched()
    with Display(out=out, interval_s=NEVER_S) as shown:
        shown.work.begun(1, "inner", 2, WORKERS)
        shown.work.lost(1, "worker0", [0, 1])
    assert out.getvalue().startswith(
        "worker0 was lost; parts 0, 1 run again on others\njobs: 1 job"
    )


def test_an_error_goes_on_and_is_named() -> None:
    out = Watched()

    def train() -> None:
        with Display(total=7, out=out, interval_s=NEVER_S) as shown:
            shown.step(3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert out.getvalue().startswith("jobs stopped by KeyboardInterrupt: 3 of 7 steps in ")
    assert "weft-progress" not in {thread.name for thread in threading.enumerate()}


def test_jobs_and_steps_of_several_threads() -> None:
    out = Watched()
    with Display(out=out, interval_s=OFTEN_S) as shown:

        def loop(number: int) -> None:
            for step in range(50):
                run_job(shown.work, 1000 * number + step)
                shown.step(loss=0.1)

        threads = [threading.Thread(target=loop, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert out.getvalue().splitlines()[-1].startswith("jobs: 200 steps, 400 parts in ")
    assert {name: share.parts for name, share in shown.workers.items()} == {
        "worker0": 200,
        "worker1": 200,
    }


def test_a_stream_that_is_closed_stops_no_program(caplog: pytest.LogCaptureFixture) -> None:
    out = Watched()
    with Display(out=out, interval_s=OFTEN_S) as shown:
        out.close()
        run_job(shown.work, 1)
        shown.step()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert shown.workers["worker0"].parts == 1


def test_characters_that_the_stream_does_not_have() -> None:
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    with Display(label="ünï", out=out, interval_s=NEVER_S):
        pass
    out.seek(0)
    assert out.read().startswith("?n?: 0 jobs")


def test_a_terminal_without_rich_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    out = Watched()
    with Display(out=out, is_terminal=True, interval_s=OFTEN_S) as shown:
        run_job(shown.work, 1)
        out.await_text("job 1 2 parts done  parts of inner 2/2\n")
    assert "\x1b" not in out.getvalue()


def test_terminals_on_which_rows_can_change(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert can_change_rows(Terminal())
    assert not can_change_rows(io.StringIO())
    assert not can_change_rows(object())  # type: ignore[arg-type]
    monkeypatch.setenv("TERM", "dumb")
    assert not can_change_rows(Terminal())


def test_arguments_that_cannot_work() -> None:
    with pytest.raises(ConfigurationError, match="total is -1: pass how many steps"):
        Display(total=-1)
    with pytest.raises(ConfigurationError, match="interval_s is 0: pass a number of seconds"):
        Display(interval_s=0)
