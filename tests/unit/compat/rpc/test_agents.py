"""Tests the meter of late wake-ups."""

from __future__ import annotations

import threading

from torchweft.compat.rpc.agents import LatenessMeter


def test_it_measures_and_ends() -> None:
    meter = LatenessMeter("lateness-test")
    try:
        assert any(thread.name == "lateness-test" for thread in threading.enumerate())
        assert meter.average_us() >= 0.0
    finally:
        meter.close()
    assert not any(thread.name == "lateness-test" for thread in threading.enumerate())
    # The measurements stay readable after close.
    assert meter.average_us() == meter.average_us()
