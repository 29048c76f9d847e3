"""Whole programs start many interpreters that import torch: on a busy machine that takes long."""

from __future__ import annotations

from pathlib import Path

import pytest

LIMIT_S = 240.0
"""For a test of this folder that does not set its own limit."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_here = Path(__file__).parent in item.path.parents
        if is_here and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))
