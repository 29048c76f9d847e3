"""Runs the tests of links on both twins, if the one in C is there."""

from __future__ import annotations

import pytest

from torchweft.native import native, reason


@pytest.fixture(scope="module", params=["plain", "native"])
def twin(request: pytest.FixtureRequest) -> str:
    """The twin that makes the links of a test."""
    kind: str = request.param
    if kind == "native" and native is None:
        pytest.skip(reason)
    return kind
