from __future__ import annotations

import os

from torchweft.errors import ObserverRefused
from torchweft.observe.session import why_silent


def test_a_process_that_is_busy_and_one_that_is_unknown() -> None:
    late = TimeoutError()
    assert f"interpreter of process {os.getpid()} busy" in why_silent(late, os.getpid(), 2.0)
    assert why_silent(late, None, 2.0) == "does not answer within 2 s"


def test_other_failures_are_told() -> None:
    assert why_silent(ObserverRefused("no"), 1, 2.0) == "has another secret than this observer"
    assert why_silent(ConnectionRefusedError("gone"), 1, 2.0) == "cannot be asked: gone"
