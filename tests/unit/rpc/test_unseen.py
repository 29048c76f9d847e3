"""Guards of errors, and how reports are logged."""

from __future__ import annotations

import gc
import math

import pytest

from torchweft.engine.worker.calls import PendingCall
from torchweft.rpc.calls import Future
from torchweft.rpc.worker import Guard, Report, _log_unseen


def test_a_guard_that_dies_armed_reports_once() -> None:
    reports: list[Report] = []
    report = Report("the call failed", KeyError("x"))
    guard = Guard(report, reports.append)
    guard.trip()
    guard.trip()
    del guard
    assert reports == [report]
    dying = Guard(report, reports.append)
    assert reports == [report]
    del dying
    assert reports == [report, report]


def test_an_error_whose_text_cannot_be_made(caplog: pytest.LogCaptureFixture) -> None:
    class Shy(Exception):
        def __repr__(self) -> str:
            raise TypeError("no")

    _log_unseen([("a call failed", Shy())])
    assert len(caplog.records) == 1


def test_an_error_is_seen_if_its_future_is_watched_while_the_guard_is_made() -> None:
    reports: list[Report] = []

    class Worker:
        future: Future[None]

        @property
        def unseen(self) -> Worker:
            return self

        def result_of(self, call: PendingCall) -> None:
            raise KeyError("x")

        def guard(self, error: BaseException, call: PendingCall) -> Guard:
            # The program attaches a callback in another thread just now.
            self.future.add_done_callback(lambda done: None)
            return Guard(Report("the call failed", error), reports.append)

    worker = Worker()
    call = PendingCall(1, "callee", "function", math.inf)
    worker.future = Future(worker, call)  # type: ignore[arg-type]
    worker.future._complete(call)
    assert worker.future.done()
    del worker
    gc.collect()
    assert reports == []
