"""Weft's files are on the list of those that PyTorch's compiler skips."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from torchweft.engine.worker import process


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes a module in place of the compiler's; returns its name."""
    name = "rules_of_a_compiler"
    (tmp_path / f"{name}.py").write_text("added = []\nadd = added.append\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(process, "_RULES", name)
    monkeypatch.setattr(process, "_has_added", False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_list_that_is_imported_later_gets_them_once(rules: str) -> None:
    finders = [*sys.meta_path]
    process.hide_from_compiler()
    process.hide_from_compiler()
    assert len(sys.meta_path) <= len(finders) + 1
    module = importlib.import_module(rules)
    assert module.added == ["torchweft"]
    assert process._finder not in sys.meta_path
