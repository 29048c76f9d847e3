from __future__ import annotations

import re

from tests.contract.conformance.lists import Baseline, read_categories
from tests.contract.conformance.report import COMMAND, PAGE, replaced, text_of


def test_page_says_what_the_lists_say() -> None:
    page = PAGE.read_text()
    now = replaced(page, text_of(Baseline.read(), read_categories()))
    assert page == now, (
        f"docs/migration.md is behind tests/contract/conformance/expected.csv: {COMMAND}"
    )


def test_page_explains_every_difference() -> None:
    explained = re.findall(r"^\(([a-z0-9-]+)\)=$", PAGE.read_text(), re.MULTILINE)
    used = {what.difference for what in Baseline.read().tests.values() if what.difference}
    assert not used - set(explained), "docs/migration.md has no heading of these names"
    assert len(explained) == len(set(explained))
