"""Sets a time limit, as many interpreters import torch slowly; leaves out what is thorough."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.thorough import THOROUGH

LIMIT_S = 240.0
"""Time limit of a test in this folder that does not set its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))
        if item.get_closest_marker("thorough") is not None and not THOROUGH:
            item.add_marker(pytest.mark.skip(reason="make thorough runs it"))
