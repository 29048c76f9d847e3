"""The page on weights by version: its program runs unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.test_pages import LIMIT_S, programs_of
from tests.inside import RunPage

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def test_both_samplers_have_the_last_version(run: RunPage, tmp_path: Path) -> None:
    (block,) = programs_of("docs/weights.md")
    (tmp_path / "versions.py").write_text(block)
    versions, *outputs, counts = run(tmp_path / "versions.py")
    assert versions == "versions [5, 5]"
    assert len(outputs) == 2
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("version 5 output ")
    assert counts == "copies 0 deltas 0", "they are on one host"
