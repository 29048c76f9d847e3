"""Runs the tests of the codec on both of its twins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchweft.engine.codec import tensors, values
from torchweft.native import native, reason


@pytest.fixture(scope="module", params=["native", "plain"])
def twin(request: pytest.FixtureRequest) -> Iterator[str]:
    """The twin that encodes and decodes during the tests of a module."""
    if request.param == "native" and native is None:
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        for module in (tensors, values):
            patch.setattr(module, "native", native if request.param == "native" else None)
        yield request.param
