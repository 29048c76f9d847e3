"""Makes the modules of the examples importable, as they are for the scripts beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parents[4] / "examples"
# All folders have a train.py; only that of the first folder is imported.
_FOLDERS = ("language_model", "meta_learning", "pipeline", "model_parallel")
sys.path[:0] = [str(_EXAMPLES / name) for name in _FOLDERS]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets matplotlib keep the files of its fonts open, in the process where pictures are drawn."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.keeps("descriptors"))
