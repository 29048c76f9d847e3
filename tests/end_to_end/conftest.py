"""Sets a time limit: on a busy machine, a program's many interpreters import torch slowly."""

from __future__ import annotations

from pathlib import Path

import pytest

LIMIT_S = 240.0
"""Time limit of a test in this folder that does not set its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_here = Path(__file__).parent in item.path.parents
        if is_here and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))
