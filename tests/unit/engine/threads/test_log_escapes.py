"""Nothing that others have made controls the terminal that shows the log."""

from __future__ import annotations

import logging

import pytest

import torchweft.engine.threads.reports  # noqa: F401

HOSTILE = "\x1b]0;owned\x07\x9b31m"


def test_messages_and_errors_are_escaped(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torchweft")
    log.warning("worker says %s", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("a call failed")
    assert caplog.text.count(r"\x1b]0;owned\x07\x9b31m") == 2
    assert "\x1b" not in caplog.text
    assert "\x9b" not in caplog.text
