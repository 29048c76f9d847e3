from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from torchweft.compat.rpc import failures
from torchweft.serialize.exceptions import pack_error, unpack_error

CALLER: Any = SimpleNamespace(name="trainer")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torchweft"):
        failures.log(CALLER, raised(ValueError("what happened")))
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
        failures.log(CALLER, remote)
        failures.log(CALLER, later)
        assert not caplog.text
        failures.log(CALLER, circle)
    assert "round" in caplog.text
