"""The page on weights by version: its program runs unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.end_to_end.apart import LIMIT_S
from tests.inside import RunPage

PAGE = "docs/weights.md"

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def test_both_samplers_have_the_last_version(run: RunPage, guide: Path) -> None:
    versions, *outputs, counts = run(guide / "versions.py")
    assert versions == "versions [5, 5]"
    assert len(outputs) == 2
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("version 5 output ")
    assert counts == "copies 0 deltas 0", "they are on one host"
