from __future__ import annotations

import time

import pytest

from torchweft import knobs
from torchweft.engine.threads.reports import LongWaits, Notice, OpenWait, names_of


def test_a_long_wait_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    open_waits = [OpenWait("first", 100.0, lambda: "in barrier for worker 'b'")]
    waits = LongWaits("a")
    waits.add(lambda: open_waits)
    assert waits.tick(109.9) == 110.0
    assert not caplog.messages
    assert waits.tick(110.0) > 1e9
    waits.tick(120.0)
    (message,) = caplog.messages
    assert message.startswith("worker 'a' has waited ")
    assert message.endswith(" s in barrier for worker 'b'")
    open_waits[:] = [OpenWait("second", 119.0, lambda: "in barrier for worker 'c'")]
    waits.tick(129.0)
    assert [message[-3:] for message in caplog.messages] == ["'b'", "'c'"]


def test_a_block_that_ends_in_time_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    waits = LongWaits("a")
    with waits.during(lambda: "in shutdown"):
        waits.tick(time.monotonic())
    waits.tick(time.monotonic() + 100.0)
    assert not caplog.messages


def test_no_limit_tells_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with knobs.WAIT_NOTICE_S.override(0.0):
        waits, notice = LongWaits("a"), Notice("rank 1", lambda: "")
    with waits.during(lambda: "in shutdown"):
        waits.tick(time.monotonic() + 1e9)
    notice.look()
    assert not caplog.messages


def test_workers_are_named() -> None:
    assert names_of(["a"]) == "worker 'a'"
    assert names_of(["a", "b"]) == "workers 'a', 'b'"
