"""Tests that need no group; others are in ``tests/contract/processes/test_compat_autograd.py``."""

from __future__ import annotations

import pytest

from torchweft.compat import autograd
from torchweft.errors import NotInitialized


def test_without_a_group() -> None:
    assert autograd.is_available()
    for function in (autograd.context().__enter__, autograd._get_debug_info):
        with pytest.raises(NotInitialized):
            function()
