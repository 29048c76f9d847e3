"""Tests the replacement of a function that modules have imported."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from torchweft.autograd.hooks import replace


def test_all_modules_that_know_a_function_by_its_name_get_the_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first() -> int:
        return 1

    def second() -> int:
        return 2

    modules = [ModuleType(f"weft_test_{number}") for number in range(3)]
    for module, name in zip(modules, ("wanted", "wanted", "_private"), strict=True):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module)[name] = first
    vars(modules[1])["wanted"] = second
    replace(first, len, "wanted")
    found = [[each for each in vars(module).values() if callable(each)] for module in modules]
    assert found == [[len], [second], [first]]
