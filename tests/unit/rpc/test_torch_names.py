"""Tests the limits of a gathering under PyTorch's names, and the log of failed calls."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from torchweft.engine.codec.exceptions import pack_error, unpack_error
from torchweft.rpc import constants
from torchweft.rpc.collective import Limits
from torchweft.rpc.torch_names import _limits, log_failure

CALLER: Any = SimpleNamespace(name="trainer")


@pytest.mark.parametrize(
    ("timeout", "default_s", "expected"),
    [
        (constants.UNSET_RPC_TIMEOUT, 5.0, Limits(5.0, math.inf)),
        (constants.UNSET_RPC_TIMEOUT, math.inf, Limits(0.0, math.inf)),
        (constants.DEFAULT_SHUTDOWN_TIMEOUT, 5.0, Limits(0.0, math.inf)),
        (2.0, 5.0, Limits(2.0, 2.0)),
    ],
)
def test_limits(timeout: float, default_s: float, expected: Limits) -> None:
    assert _limits(timeout, default_s) == expected


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torchweft"):
        log_failure(CALLER, raised(ValueError("what happened")))
    assert "a call of worker 'trainer' failed here" in caplog.text
    assert "ValueError: what happened" in caplog.text
    assert __file__ in caplog.text


def test_an_error_of_another_worker_is_logged_there(caplog: pytest.LogCaptureFixture) -> None:
    remote = unpack_error(pack_error(raised(ValueError("elsewhere")), "other"))
    later = RuntimeError("because of it")
    later.__cause__ = remote
    circle = KeyError("round")
    circle.__context__ = RuntimeError("and round")
    circle.__context__.__context__ = circle
    with caplog.at_level(logging.WARNING, "torchweft"):
        log_failure(CALLER, remote)
        log_failure(CALLER, later)
        assert not caplog.text
        log_failure(CALLER, circle)
    assert "round" in caplog.text
