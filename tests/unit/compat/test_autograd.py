"""Tests that need no group; others are in ``tests/contract/processes/test_compat_autograd.py``."""

from __future__ import annotations

import pytest

from torchweft.compat import autograd
from torchweft.errors import ArgumentTypeError, ConfigurationError, NotInitialized


def test_numbers_that_no_worker_has() -> None:
    for number in (-1, 1 << 16):
        with pytest.raises(ConfigurationError, match="from 0 to 65535"):
            autograd._init(number)
    with pytest.raises(ArgumentTypeError):
        autograd._init("worker0")  # type: ignore[arg-type]


def test_without_a_group() -> None:
    assert autograd.is_available()
    for function in (autograd.context().__enter__, autograd._get_debug_info):
        with pytest.raises(NotInitialized):
            function()
