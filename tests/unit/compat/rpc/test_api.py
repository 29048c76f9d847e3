"""Tests the time limits of ``_all_gather``."""

from __future__ import annotations

import math

import pytest

from torchweft.compat.rpc.api import _limits
from torchweft.rpc import constants
from torchweft.rpc.collective import Limits


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
