from __future__ import annotations

import re

import pytest

from tests.contract.conformance.lists import Baseline, Expected, read_categories
from tests.contract.conformance.report import BEGIN, COMMAND, END, PAGE, replaced, text_of
from tests.tools.conformance.results import case


def test_figures_and_names_come_from_the_lists() -> None:
    tests = {
        case("test_add"): Expected("pass"),
        case("test_sub"): Expected("fail", 0.3, "unused-results", "asserts a hang"),
        case("test_gpu", suite="cuda"): Expected("skip"),
    }
    categories = dict.fromkeys(tests, "public") | {case("test_mul"): "shim"}
    text = text_of(Baseline("2.13.0", tests), categories)
    assert text.startswith(
        "Of the 4 tests in the wheel of torch 2.13.0, Weft passes 1 on a machine"
    )
    assert "| public | 3 | 1 | 1 | 1 |" in text
    assert "| shim | 1 | 0 | 1 | 0 |" in text
    assert "| **all** | 4 | 1 | 2 | 1 |" in text
    reason = (
        "- **[unused-results](#unused-results)**: asserts a hang (1)\n  - `tp.RpcTest`: `test_sub`"
    )
    assert reason in text
    assert text.endswith("- **not explained yet** (1)\n  - `tp.RpcTest`: `test_mul`")


def test_only_the_part_between_the_marks_is_replaced() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = replaced(page, "new")
    assert once == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert replaced(once, "new") == once
    with pytest.raises(ValueError, match="the page needs one part between"):
        replaced("before", "new")


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
