"""Tests the display as a log, with made-up events and a real thread.

No test waits for a fixed time: a test waits until the expected text was written.
"""

from __future__ import annotations

import logging
import threading

import pytest

from tests.unit.progress.watched import NEVER_S, OFTEN_S, WORKERS, Watched, run_job
from torchweft.progress import Display


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


def test_a_stream_that_is_closed_stops_no_program(caplog: pytest.LogCaptureFixture) -> None:
    out = Watched()
    with Display(out=out, interval_s=OFTEN_S) as shown:
        out.close()
        run_job(shown.work, 1)
        shown.step()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert shown.workers["worker0"].parts == 1
