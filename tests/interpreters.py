"""Marks of tests about something that not every Python does."""

from __future__ import annotations

import sys

import pytest

from torchweft.free_threading import IS_FREE_THREADED

frees_functions = pytest.mark.skipif(
    IS_FREE_THREADED and sys.version_info < (3, 14),
    reason="once it has a second thread, free-threaded Python 3.13 frees no code and no class",
)
